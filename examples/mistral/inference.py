"""Generate text with Mistral: python examples/mistral/inference.py model.hf_model_name=mistralai/Mistral-7B-v0.1"""

from poptransformer.config import run_example

if __name__ == "__main__":
    run_example("mistral")

"""Generate text with Llama and its kin: python examples/llama/inference.py model.hf_model_name=HuggingFaceTB/SmolLM2-135M"""

from poptransformer.config import run_example

if __name__ == "__main__":
    run_example("llama")

"""Generate text with Phi 1, 1.5 and 2: python examples/phi/inference.py model.hf_model_name=microsoft/phi-2"""

from poptransformer.config import run_example

if __name__ == "__main__":
    run_example("phi")

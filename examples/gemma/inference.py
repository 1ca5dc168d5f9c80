"""Generate text with Gemma: python examples/gemma/inference.py model.hf_model_name=google/gemma-2b"""

from poptransformer.config import run_example

if __name__ == "__main__":
    run_example("gemma")

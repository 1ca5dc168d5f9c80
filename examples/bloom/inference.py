"""Generate text with BLOOM: python examples/bloom/inference.py model.hf_model_name=bigscience/bloom-560m"""

from poptransformer.config import run_example

if __name__ == "__main__":
    run_example("bloom")

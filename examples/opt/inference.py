"""Generate text with OPT: python examples/opt/inference.py model.hf_model_name=facebook/opt-125m"""

from poptransformer.config import run_example

if __name__ == "__main__":
    run_example("opt")

"""Generate text with Qwen3: python examples/qwen3/inference.py model.hf_model_name=Qwen/Qwen3-0.6B"""

from poptransformer.config import run_example

if __name__ == "__main__":
    run_example("qwen3")

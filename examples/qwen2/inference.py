"""Generate text with Qwen2: python examples/qwen2/inference.py model.hf_model_name=Qwen/Qwen2-0.5B"""

from poptransformer.config import run_example

if __name__ == "__main__":
    run_example("qwen2")

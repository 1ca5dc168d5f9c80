"""Generate text with RWKV-4: python examples/rwkv/inference.py model.hf_model_name=RWKV/rwkv-4-169m-pile"""

from poptransformer.config import run_example

if __name__ == "__main__":
    run_example("rwkv")

"""Generate text with ChatGLM-6B: python examples/chatglm/inference.py model.hf_model_name=THUDM/chatglm-6b"""

from poptransformer.config import run_example

if __name__ == "__main__":
    run_example("chatglm")

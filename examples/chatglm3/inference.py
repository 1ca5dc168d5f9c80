"""Generate text with ChatGLM3-6B: python examples/chatglm3/inference.py model.hf_model_name=THUDM/chatglm3-6b"""

from poptransformer.config import run_example

if __name__ == "__main__":
    run_example("chatglm3")

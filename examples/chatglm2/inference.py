"""Generate text with ChatGLM2-6B: python examples/chatglm2/inference.py model.hf_model_name=THUDM/chatglm2-6b"""

from poptransformer.config import run_example

if __name__ == "__main__":
    run_example("chatglm2")

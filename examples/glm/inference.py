"""Generate text with GLM-4: python examples/glm/inference.py model.hf_model_name=THUDM/glm-4-9b-hf"""

from poptransformer.config import run_example

if __name__ == "__main__":
    run_example("glm")

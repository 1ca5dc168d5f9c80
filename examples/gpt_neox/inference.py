"""Generate text with GPT-NeoX or Pythia: python examples/gpt_neox/inference.py model.hf_model_name=EleutherAI/pythia-160m"""

from poptransformer.config import run_example

if __name__ == "__main__":
    run_example("gpt_neox")

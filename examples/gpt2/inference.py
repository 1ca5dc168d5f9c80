"""Generate text with GPT-2: python examples/gpt2/inference.py [--config-name=sharding] [model.topk=5 ...]"""

from poptransformer.config import run_example

if __name__ == "__main__":
    run_example("gpt2")

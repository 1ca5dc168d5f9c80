"""Generate text with GPT-2: python examples/gpt2/inference.py [--config-name=sharding] [model.topk=5 ...]"""

from poptransformer.config import Config, main
from poptransformer.report import show


@main(config_dir="gpt2", config_name="sharding")
def run(config: Config):
    with config.open_session() as session:
        show(session, config)


if __name__ == "__main__":
    run()

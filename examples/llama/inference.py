"""Generate text with Llama and its kin: python examples/llama/inference.py model.hf_model_name=HuggingFaceTB/SmolLM2-135M"""

from poptransformer.config import Config, main
from poptransformer.report import show


@main(config_dir="llama", config_name="sharding")
def run(config: Config):
    with config.open_session() as session:
        show(session, config)


if __name__ == "__main__":
    run()

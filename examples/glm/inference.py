"""Generate text with GLM-4: python examples/glm/inference.py model.hf_model_name=THUDM/glm-4-9b-hf"""

from poptransformer.config import Config, main
from poptransformer.report import show


@main(config_dir="glm", config_name="sharding")
def run(config: Config):
    with config.open_session() as session:
        show(session, config)


if __name__ == "__main__":
    run()

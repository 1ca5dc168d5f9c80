"""Generate text with ChatGLM-6B: python examples/chatglm/inference.py model.hf_model_name=THUDM/chatglm-6b"""

from poptransformer.config import Config, main
from poptransformer.report import show


@main(config_dir="chatglm", config_name="sharding")
def run(config: Config):
    with config.open_session() as session:
        show(session, config)


if __name__ == "__main__":
    run()

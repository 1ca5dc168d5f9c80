"""Generate text with ChatGLM3-6B: python examples/chatglm3/inference.py model.hf_model_name=THUDM/chatglm3-6b"""

from poptransformer.config import Config, main
from poptransformer.report import show


@main(config_dir="chatglm3", config_name="sharding")
def run(config: Config):
    with config.open_session() as session:
        show(session, config)


if __name__ == "__main__":
    run()

"""Generate text with RWKV-4: python examples/rwkv/inference.py model.hf_model_name=RWKV/rwkv-4-169m-pile"""

from poptransformer.config import Config, main
from poptransformer.report import report, transcript


@main(config_dir="rwkv", config_name="sharding")
def run(config: Config):
    with config.open_session() as session:
        generations = session.generate(config.inputs.prompts, **config.generation_settings())
        print(transcript(config.inputs.prompts, generations))
        print(report(session, generations))


if __name__ == "__main__":
    run()

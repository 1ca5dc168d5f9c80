"""Generate text with Llama and its kin: python examples/llama/inference.py model.hf_model_name=HuggingFaceTB/SmolLM2-135M"""

from poptransformer.config import Config, main
from poptransformer.report import report, transcript


@main(config_dir="llama", config_name="sharding")
def run(config: Config):
    with config.open_session() as session:
        generations = session.generate(config.inputs.prompts, **config.generation_settings())
        print(transcript(config.inputs.prompts, generations))
        print(report(session, generations))


if __name__ == "__main__":
    run()

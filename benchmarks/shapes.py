"""Real models' shapes by name, for runs with random weights."""

from poptransformer.planning.shapes import SHAPES as KNOWN

SHAPES = {"gpt2-124m": KNOWN["gpt2"].config} | {name: shape.config for name, shape in KNOWN.items()}


def hf_config(name: str) -> dict:
    """The shape's config.json as a dict; Session takes it for `model` with random_weights=True.

    Args:
      name: one of SHAPES, or one with a number of layers instead of its own: "llama-2-7b:8".
    """
    name, _, num_layers = name.partition(":")
    if name not in SHAPES:
        raise SystemExit(f"no shape {name!r}; there are {', '.join(SHAPES)}")
    config = dict(SHAPES[name])
    if num_layers:
        key = next(key for key in ("num_hidden_layers", "num_layers", "n_layer") if key in config)
        config[key] = int(num_layers)
    return config


def prompt_ending(config) -> list[int]:
    """Token ids that a prompt of a model must end with: ChatGLM-6B's blank and where its filling begins; none elsewhere.

    Args:
      config: the model's config dataclass.
    """
    return [config.gmask_token_id, config.sop_token_id] if hasattr(config, "gmask_token_id") else []

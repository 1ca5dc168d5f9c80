"""Real models' shapes by name, for runs with random weights."""

from poptransformer.planning.shapes import SHAPES as KNOWN

SHAPES = {"gpt2-124m": KNOWN["gpt2"].config} | {name: shape.config for name, shape in KNOWN.items()}


def hf_config(name: str) -> dict:
    """The shape's config.json as a dict; Session takes it for `model` with random_weights=True."""
    if name not in SHAPES:
        raise SystemExit(f"no shape {name!r}; there are {', '.join(SHAPES)}")
    return SHAPES[name]

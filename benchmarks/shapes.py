"""Real models' shapes by name, for runs with random weights."""

SHAPES = {
    "gpt2-124m": {"n_embd": 768, "n_layer": 12, "n_head": 12},
    "gpt2-medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16},
    "gpt2-large": {"n_embd": 1280, "n_layer": 36, "n_head": 20},
    "gpt2-xl": {"n_embd": 1600, "n_layer": 48, "n_head": 25},
}


def hf_config(name: str) -> dict:
    """The shape's config.json as a dict; Session takes it for `model` with random_weights=True."""
    if name not in SHAPES:
        raise SystemExit(f"no shape {name!r}; there are {', '.join(SHAPES)}")
    return {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "tie_word_embeddings": True, **SHAPES[name]}

"""Real models' shapes by name, for runs with random weights."""

GPT2 = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "tie_word_embeddings": True}
LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5}
LLAMA3_SCALING = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
SHAPES = {
    "gpt2-124m": GPT2 | {"n_embd": 768, "n_layer": 12, "n_head": 12},
    "gpt2-medium": GPT2 | {"n_embd": 1024, "n_layer": 24, "n_head": 16},
    "gpt2-large": GPT2 | {"n_embd": 1280, "n_layer": 36, "n_head": 20},
    "gpt2-xl": GPT2 | {"n_embd": 1600, "n_layer": 48, "n_head": 25},
    "smollm2-135m": LLAMA | {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
        "rope_theta": 100000.0, "tie_word_embeddings": True,
    },
    "llama-3.2-1b": LLAMA | {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
        "rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING, "tie_word_embeddings": True,
    },
    "llama-2-7b": LLAMA | {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096,
        "rope_theta": 10000.0, "tie_word_embeddings": False,
    },
    "rwkv-4-169m": {
        "model_type": "rwkv", "vocab_size": 50277, "hidden_size": 768, "num_hidden_layers": 12, "context_length": 1024,
        "layer_norm_epsilon": 1e-5, "rescale_every": 6,
    },
}  # fmt: skip


def hf_config(name: str) -> dict:
    """The shape's config.json as a dict; Session takes it for `model` with random_weights=True."""
    if name not in SHAPES:
        raise SystemExit(f"no shape {name!r}; there are {', '.join(SHAPES)}")
    return SHAPES[name]

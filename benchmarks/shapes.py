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
    "chatglm-6b": {
        "model_type": "chatglm", "vocab_size": 130528, "hidden_size": 4096, "inner_hidden_size": 16384, "num_layers": 28,
        "num_attention_heads": 32, "max_sequence_length": 2048, "position_encoding_2d": True, "layernorm_epsilon": 1e-5,
        "bos_token_id": 130004, "mask_token_id": 130000, "gmask_token_id": 130001, "eos_token_id": 130005, "pad_token_id": 3,
    },
    "chatglm2-6b": {
        "model_type": "chatglm", "padded_vocab_size": 65024, "hidden_size": 4096, "ffn_hidden_size": 13696, "num_layers": 28,
        "num_attention_heads": 32, "multi_query_attention": True, "multi_query_group_num": 2, "kv_channels": 128,
        "seq_length": 32768, "layernorm_epsilon": 1e-5, "rmsnorm": True, "add_qkv_bias": True, "add_bias_linear": False,
        "original_rope": True, "post_layer_norm": True, "apply_residual_connection_post_layernorm": False,
        "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
    },
    "rwkv-4-1.5b": {
        "model_type": "rwkv", "vocab_size": 50277, "hidden_size": 2048, "num_hidden_layers": 24, "context_length": 1024,
        "layer_norm_epsilon": 1e-5, "rescale_every": 6,
    },
    "rwkv-4-169m": {
        "model_type": "rwkv", "vocab_size": 50277, "hidden_size": 768, "num_hidden_layers": 12, "context_length": 1024,
        "layer_norm_epsilon": 1e-5, "rescale_every": 6,
    },
}  # fmt: skip


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

"""The shapes of well-known models, as their config.json gives them, so that a plan needs neither files nor a network.

Only what sizes and families depend on is here, and the tests check the counts of parameters against the published ones.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model's name on the Hugging Face hub and what matters of its config.json."""

    hub_name: str
    config: dict


def _gpt2(hub_name, n_embd, n_layer, n_head):
    config = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "tie_word_embeddings": True}
    return Shape(hub_name, config | {"n_embd": n_embd, "n_layer": n_layer, "n_head": n_head})


def _llama(
    hub_name, vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, max_seq_len, rope_theta=10000.0,
    model_type="llama", **more,
):  # fmt: skip
    config = {
        "model_type": model_type, "vocab_size": vocab_size, "hidden_size": hidden_size, "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers, "num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": max_seq_len, "rope_theta": rope_theta, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip
    return Shape(hub_name, config | more)


def _qwen2(
    hub_name, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, vocab_size, is_tied, max_seq_len=32768
):
    return _llama(
        hub_name, vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, max_seq_len, 1000000.0,
        "qwen2", rms_norm_eps=1e-6, tie_word_embeddings=is_tied, use_sliding_window=False,
    )  # fmt: skip


def _chatglm2(hub_name, seq_length):
    config = {
        "model_type": "chatglm", "padded_vocab_size": 65024, "hidden_size": 4096, "ffn_hidden_size": 13696, "num_layers": 28,
        "num_attention_heads": 32, "multi_query_attention": True, "multi_query_group_num": 2, "kv_channels": 128,
        "seq_length": seq_length, "layernorm_epsilon": 1e-5, "rmsnorm": True, "add_bias_linear": False, "add_qkv_bias": True,
        "apply_residual_connection_post_layernorm": False, "post_layer_norm": True,
    }  # fmt: skip
    return Shape(hub_name, config)


def _rwkv4(hub_name, hidden_size, num_layers):
    return Shape(hub_name, {
        "model_type": "rwkv", "vocab_size": 50277, "hidden_size": hidden_size, "num_hidden_layers": num_layers,
        "context_length": 1024, "layer_norm_epsilon": 1e-5, "rescale_every": 6, "tie_word_embeddings": False,
    })  # fmt: skip


_LLAMA3_SCALING = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_LLAMA3_2 = {"rope_scaling": _LLAMA3_SCALING, "tie_word_embeddings": True}
_CHATGLM_6B = {
    "model_type": "chatglm", "vocab_size": 130528, "hidden_size": 4096, "inner_hidden_size": 16384, "num_layers": 28,
    "num_attention_heads": 32, "max_sequence_length": 2048, "layernorm_epsilon": 1e-5, "position_encoding_2d": True,
    "bos_token_id": 130004, "eos_token_id": 130005, "mask_token_id": 130000, "gmask_token_id": 130001,
}  # fmt: skip

SHAPES = {
    "gpt2": _gpt2("openai-community/gpt2", 768, 12, 12),
    "gpt2-medium": _gpt2("openai-community/gpt2-medium", 1024, 24, 16),
    "gpt2-large": _gpt2("openai-community/gpt2-large", 1280, 36, 20),
    "gpt2-xl": _gpt2("openai-community/gpt2-xl", 1600, 48, 25),
    "llama-2-7b": _llama("meta-llama/Llama-2-7b-hf", 32000, 4096, 11008, 32, 32, 32, 4096),
    "llama-2-13b": _llama("meta-llama/Llama-2-13b-hf", 32000, 5120, 13824, 40, 40, 40, 4096),
    "llama-2-70b": _llama("meta-llama/Llama-2-70b-hf", 32000, 8192, 28672, 80, 64, 8, 4096),
    "llama-3-8b": _llama("meta-llama/Meta-Llama-3-8B", 128256, 4096, 14336, 32, 32, 8, 8192, 500000.0),
    "llama-3-70b": _llama("meta-llama/Meta-Llama-3-70B", 128256, 8192, 28672, 80, 64, 8, 8192, 500000.0),
    "llama-3.2-1b": _llama("meta-llama/Llama-3.2-1B", 128256, 2048, 8192, 16, 32, 8, 131072, 500000.0, **_LLAMA3_2),
    "llama-3.2-3b": _llama("meta-llama/Llama-3.2-3B", 128256, 3072, 8192, 28, 24, 8, 131072, 500000.0, **_LLAMA3_2),
    "mistral-7b": _llama(
        "mistralai/Mistral-7B-v0.1", 32000, 4096, 14336, 32, 32, 8, 32768, model_type="mistral", sliding_window=4096
    ),
    "qwen2-0.5b": _qwen2("Qwen/Qwen2-0.5B", 896, 4864, 24, 14, 2, 151936, True, 131072),
    "qwen2-1.5b": _qwen2("Qwen/Qwen2-1.5B", 1536, 8960, 28, 12, 2, 151936, True, 131072),
    "qwen2-7b": _qwen2("Qwen/Qwen2-7B", 3584, 18944, 28, 28, 4, 152064, False, 131072),
    "qwen2-72b": _qwen2("Qwen/Qwen2-72B", 8192, 29568, 80, 64, 8, 152064, False, 131072),
    "smollm2-135m": _llama(
        "HuggingFaceTB/SmolLM2-135M", 49152, 576, 1536, 30, 9, 3, 8192, 100000.0, tie_word_embeddings=True
    ),
    "chatglm-6b": Shape("THUDM/chatglm-6b", _CHATGLM_6B),
    "chatglm2-6b": _chatglm2("THUDM/chatglm2-6b", 32768),
    "chatglm3-6b": _chatglm2("THUDM/chatglm3-6b", 8192),
    "rwkv-4-169m": _rwkv4("RWKV/rwkv-4-169m-pile", 768, 12),
    "rwkv-4-1.5b": _rwkv4("RWKV/rwkv-4-1b5-pile", 2048, 24),
    "rwkv-4-7b": _rwkv4("RWKV/rwkv-4-7b-pile", 4096, 32),
}  # fmt: skip


def find_shape(name: str) -> Shape | None:
    """The shape of a name here or on the hub, in any letter case; None if it is not in the table."""
    key = name.lower()
    if key in SHAPES:
        return SHAPES[key]
    return next(
        (shape for shape in SHAPES.values() if key in (shape.hub_name.lower(), shape.hub_name.lower().split("/")[1])), None
    )

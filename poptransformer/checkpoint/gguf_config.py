"""A GGUF file's metadata as the configuration that Hugging Face would have for the model.

Keys of the model's shape start with the architecture's name, "llama.block_count"; those of the tokenizer with
"tokenizer.". Source: the GGUF specification in the ggml project, docs/gguf.md; how llama.cpp takes what it leaves open.
"""

import logging
import reprlib

from poptransformer.errors import UnsupportedError, UserError, near_miss

logger = logging.getLogger(__name__)

# Architectures of the family of llama.py -> what their config has as model_type.
LLAMA_KIN = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
ARCHITECTURES = (*LLAMA_KIN, "gpt2")

# Texts of tokens that end a turn or a text, whether or not a file's metadata says so: models answer with several of them.
END_TEXTS = frozenset(
    ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>")
)

# Keys, behind the architecture's name, that say nothing which is not known otherwise.
_NEUTRAL = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")
# Keys that change results and have no counterpart in these models, unless they are 0 or 1.
_REFUSED = (
    "attention.clamp_kqv", "attention.scale", "attention.temperature_scale", "attn_logit_softcapping", "embedding_scale",
    "expert_count", "final_logit_softcapping", "logit_scale", "residual_scale", "rope.scaling.alpha",
    "rope.scaling.yarn_log_multiplier",
)  # fmt: skip


def check_architecture(header):
    """Return general.architecture. Raises: UnsupportedError, with the list, for one that no model here runs."""
    name = header.get("general.architecture", str)
    if name is None:
        raise UserError(f"{header.path}: metadata lacks general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedError(
            f"{header.path}: GGUF files of architecture {reprlib.repr(name)} are not supported"
            f"{near_miss(name, ARCHITECTURES)}; those of {', '.join(ARCHITECTURES)} are"
        )
    parts = header.get("split.count", int, 1)
    if parts > 1:
        raise UnsupportedError(
            f"{header.path}: part {header.get('split.no', int, 0) + 1} of a model split into {parts} files; join them first: "
            "llama-gguf-split --merge FIRST_PART WHOLE"
        )
    return name


def read_config(header, rope_factors=None):
    """Build what config.json would say.

    Args:
      header: a GGUFHeader.
      rope_factors: values of the tensor rope_freqs.weight, a list, by which each rotary frequency is divided; None where
        there is none. They come back as rope_scaling of type "factors": what they were computed from (Llama 3's factor and
        borders) is not in the file and does not follow from them.
    Returns: dict.
    Raises: UserError naming all keys that are missing, or one that is wrong; UnsupportedError for what no model here does.
    """
    architecture = check_architecture(header)
    keys = _Keys(header, architecture + ".")
    refused = [key for key in _REFUSED if keys.get(key, None, 0) not in (0, 1)]
    if refused or not keys.get("attention.causal", bool, True):
        names = ", ".join(keys.prefix + key for key in refused or ["attention.causal"])
        raise UnsupportedError(f"{header.path}: {names}: no model here does what this asks for")
    config = _gpt2(keys) if architecture == "gpt2" else _llama(keys, LLAMA_KIN[architecture], rope_factors)
    config |= {
        "vocab_size": _vocab_size(header, keys),
        # Converters leave the head out where it is the embedding.
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": header.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": end_ids(header),
    }
    if unused := keys.unused():
        logger.info("%s: metadata without a use here: %s", header.path, ", ".join(unused))
    return config


def end_ids(header):
    """Return the ids of tokens that end a text or a turn: those the metadata names and those with a text known for it."""
    named = (header.get(f"tokenizer.ggml.{name}_token_id", int) for name in ("eos", "eot", "eom"))
    tokens = header.get("tokenizer.ggml.tokens", list, []) if header.item_kind("tokenizer.ggml.tokens") is str else []
    known = (token_id for token_id, text in enumerate(tokens) if text in END_TEXTS)
    return list(dict.fromkeys(token_id for token_id in (*named, *known) if token_id is not None))


class _Keys:
    """The metadata of one architecture; remembers what was asked for."""

    def __init__(self, header, prefix):
        self.header, self.prefix = header, prefix
        self._used = set(_NEUTRAL)

    def get(self, key, kind, default=None):
        """As GGUFHeader.get; an array that has a number for each layer counts as that number if they are all the same."""
        self._used.add(key)
        if self.header.item_kind(self.prefix + key) in (int, float):
            values = set(self.header.get(self.prefix + key, list))
            if len(values) != 1:
                raise UnsupportedError(f"{self.header.path}: {self.prefix}{key} differs by layer, which no model here does")
            return values.pop()
        return self.header.get(self.prefix + key, kind, default)

    def sizes(self, **keys):
        """Return our name -> whole number, of keys that must be there."""
        missing = [self.prefix + key for key in keys.values() if self.prefix + key not in self.header]
        if missing:
            raise UserError(f"{self.header.path}: metadata lacks {', '.join(missing)}")
        return {name: self.get(key, int) for name, key in keys.items()}

    def unused(self):
        names = [key.removeprefix(self.prefix) for key in self.header.keys() if key.startswith(self.prefix)]
        return sorted(self.prefix + name for name in names if name not in self._used)


def _vocab_size(header, keys):
    """The embedding's rows; without one what the metadata says, or how many tokens the tokenizer has."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None:
        return embedding.shape[0]
    stated = keys.get("vocab_size", int)
    return stated if stated is not None else len(header.get("tokenizer.ggml.tokens", list, []))


def _gpt2(keys):
    sizes = keys.sizes(
        n_positions="context_length", n_embd="embedding_length", n_layer="block_count", n_head="attention.head_count",
        n_inner="feed_forward_length",
    )  # fmt: skip
    eps = keys.get("attention.layer_norm_epsilon", float, 1e-5)
    return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "layer_norm_epsilon": eps} | sizes


def _llama(keys, model_type, rope_factors):
    header, tensors = keys.header, keys.header.tensors
    sizes = keys.sizes(
        hidden_size="embedding_length", intermediate_size="feed_forward_length", num_hidden_layers="block_count",
        num_attention_heads="attention.head_count", max_position_embeddings="context_length",
    )  # fmt: skip
    head_dim = keys.get("attention.key_length", int, sizes["hidden_size"] // max(sizes["num_attention_heads"], 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.get(key, int, head_dim) != head_dim:
            raise UnsupportedError(
                f"{header.path}: {keys.prefix}{key}={keys.get(key, int)} is not supported; heads have {head_dim} features, of "
                "keys and values alike, and all of them turn"
            )
    config = {
        "model_type": model_type,
        "num_key_value_heads": keys.get("attention.head_count_kv", int, sizes["num_attention_heads"]),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": keys.get("attention.layer_norm_rms_epsilon", float, 1e-6),
        "rope_theta": keys.get("rope.freq_base", float, 10000.0),
        "rope_scaling": _rope_scaling(keys, sizes["max_position_embeddings"], rope_factors),
    }
    window = keys.get("attention.sliding_window", int, 0)
    if model_type == "llama":
        config |= {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_gate.bias" in tensors}
        if window:  # what tells Mistral from Llama
            config |= {"model_type": "mistral", "sliding_window": window}
    elif window:
        config |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    elif model_type == "qwen3":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    return config | sizes


def _rope_scaling(keys, max_seq_len, rope_factors):
    """Rotary scaling under Hugging Face's keys; None where there is none."""
    path, prefix = keys.header.path, keys.prefix + "rope.scaling."
    kind = keys.get("rope.scaling.type", str)
    # Files from before rope.scaling had the factor of a linear scaling alone.
    factor = keys.get("rope.scaling.factor", float, 0.0) or keys.get("rope.scale_linear", float, 0.0) or 1.0
    original = keys.get("rope.scaling.original_context_length", int, max_seq_len)
    attention = keys.get("rope.scaling.attn_factor", float, 0.0) or keys.get("rope.scaling.yarn_attn_factor", float, 0.0)
    betas = {name: keys.get(f"rope.scaling.yarn_{name}", float) for name in ("beta_fast", "beta_slow")}
    if kind not in (None, "none", "linear", "yarn"):
        raise UnsupportedError(f"{path}: {prefix}type={reprlib.repr(kind)} is not supported; none, linear and yarn are")
    if kind == "yarn":
        if rope_factors is not None or keys.get("rope.scaling.yarn_ext_factor", float, 1.0) != 1 or attention not in (0, 1):
            raise UnsupportedError(
                f"{path}: {prefix}type='yarn' together with a tensor rope_freqs.weight, or with a yarn_ext_factor or "
                "attn_factor other than 1, is not supported"
            )
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        return scaling | {name: value for name, value in betas.items() if value}
    if kind == "none":
        factor = 1.0
    if attention not in (0, 1):
        raise UnsupportedError(f"{path}: {prefix}attn_factor={attention:g} is not supported without yarn")
    if rope_factors is not None:
        return {"rope_type": "factors", "factors": [factor * value for value in rope_factors]}
    return None if factor == 1 else {"rope_type": "linear", "factor": factor}

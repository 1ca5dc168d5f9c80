"""RWKV-4: a recurrence in the place of attention, so that a row's memory has one size however long the row is.

Source: Peng et al. 2023, arXiv:2305.13048; HF modeling_rwkv.py.
"""

from __future__ import annotations

import dataclasses
import logging
import re

import numpy as np

from poptransformer import ops
from poptransformer.errors import UnsupportedError, UserError
from poptransformer.graph import State
from poptransformer.layers import BaseLayer, Embedding, LayerNorm, Linear, LMHead
from poptransformer.models.config import LARGEST_SIZE, read_bool, read_config, read_number
from poptransformer.models.decoder_model import DecoderModel
from poptransformer.register import REGISTER

logger = logging.getLogger(__name__)

FINAL_NORM_EPS = 1e-5  # transformers and the original code do not ask the config here
DEFAULTS = {"context_length": 1024}  # what transformers takes where config.json lacks the key

# What an original .pth does not say of itself.
ORIGINAL = {
    "model_type": "rwkv", "context_length": 1024, "layer_norm_epsilon": 1e-5, "rescale_every": 6, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip

# Parts of names in Hugging Face checkpoints -> in the original ones.
ORIGINAL_NAMES = {
    "feed_forward": "ffn", "attention": "att", "embeddings": "emb", "pre_ln": "ln0",
    "time_mix_key": "time_mix_k", "time_mix_value": "time_mix_v", "time_mix_receptance": "time_mix_r",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RWKVConfig:
    """Sizes and switches of an RWKV-4, with their keys in the Hugging Face config where those differ."""

    vocab_size: int
    hidden_size: int
    attention_hidden_size: int  # None there means hidden_size
    intermediate_size: int  # None there means 4 * hidden_size
    num_layers: int  # num_hidden_layers
    max_seq_len: int  # context_length: what the model was trained on; rows may be longer
    norm_eps: float  # layer_norm_epsilon; of all norms but the last
    rescale_every: int  # layers after which the residual stream is halved; 0 for never
    is_tied: bool  # tie_word_embeddings

    @classmethod
    def from_hf(cls, config: dict) -> RWKVConfig:
        """Read a config.json.

        Raises: UserError naming keys that are missing or wrong.
        """
        optional = [key for key in ("attention_hidden_size", "intermediate_size") if config.get(key) is not None]
        sizes = read_config(
            DEFAULTS | config, vocab_size="vocab_size", hidden_size="hidden_size", num_layers="num_hidden_layers",
            max_seq_len="context_length", **{key: key for key in optional},
        )  # fmt: skip
        rescale_every = config.get("rescale_every", 6)
        if not isinstance(rescale_every, int) or isinstance(rescale_every, bool) or rescale_every > LARGEST_SIZE:
            raise UserError(f"config.json: rescale_every={rescale_every!r}: wanted a whole number, 0 for never")
        defaults = {"attention_hidden_size": sizes["hidden_size"], "intermediate_size": 4 * sizes["hidden_size"]}
        return cls(
            **defaults | sizes,
            norm_eps=read_number(config, "layer_norm_epsilon", 1e-5),
            rescale_every=max(rescale_every, 0),
            is_tied=read_bool(config, "tie_word_embeddings", False),
        )


class TokenShift(BaseLayer):
    """Mixes of each token with the one before it, one for each name.

    Checkpoint keys: `time_mix_<name>: [1, 1, hidden_size]`, the new token's share.
    """

    def __init__(self, name, hidden_size, mixes):
        super().__init__(name)
        self.mixes = [self.parameter(f"time_mix_{mix}", (1, 1, hidden_size)) for mix in mixes]
        self.state = State(f"{name}.shift_state", (REGISTER.batch_size, hidden_size), np.dtype(np.float32))

    def forward(self, x, tokens):
        """x: [B, T, D], tokens: DecoderTokens -> a list of [B, T, D]."""
        mixes = [ops.reshape(x.graph.parameter(mix), (-1,)) for mix in self.mixes]
        *mixed, tokens.states[self.state] = ops.token_shift(
            x, tokens.states[self.state], tokens.cache_len, tokens.num_tokens, *mixes
        )
        return mixed


class RWKVAttention(BaseLayer):
    """output(sigmoid(receptance) * wkv(key, value)): what tokens so far have to say, and how much of it is let through.

    Checkpoint keys: `time_decay`, `time_first`: [A], `time_mix_{key,value,receptance}`, `{key,value,receptance}.weight`:
    [A, D], `output.weight`: [D, A], with A = attention_hidden_size.
    """

    def __init__(self, name, config: RWKVConfig):
        super().__init__(name)
        width, float32 = config.attention_hidden_size, np.dtype(np.float32)
        self.shift = TokenShift(name, config.hidden_size, ("key", "value", "receptance"))
        self.key, self.value, self.receptance = (
            Linear(f"{name}.{key}", config.hidden_size, width, bias=False, shard="column")
            for key in ("key", "value", "receptance")
        )
        cut = self.even_cut(0, width)  # every feature is computed by itself
        self.time_decay = self.parameter("time_decay", (width,), float32, cut)
        self.time_first = self.parameter("time_first", (width,), float32, cut)
        self.out = Linear(f"{name}.output", width, config.hidden_size, bias=False, shard="row")
        self.wkv_state = State(f"{name}.wkv_state", (REGISTER.batch_size, 3, *self.time_decay.shape), float32, cut is not None)

    def forward(self, x, tokens):
        """x: [B, T, D], tokens: DecoderTokens whose states hold this layer's -> [B, T, D]."""
        for_key, for_value, for_receptance = self.shift(x, tokens)
        mixed, tokens.states[self.wkv_state] = ops.wkv(
            self.key(for_key), self.value(for_value), x.graph.parameter(self.time_decay), x.graph.parameter(self.time_first),
            tokens.states[self.wkv_state], tokens.cache_len, tokens.num_tokens,
        )  # fmt: skip
        return self.out(ops.sigmoid(self.receptance(for_receptance)) * mixed)


class RWKVFeedForward(BaseLayer):
    """sigmoid(receptance) * value(relu(key)^2).

    Checkpoint keys: `time_mix_{key,receptance}`, `key.weight`: [F, D], `value.weight`: [D, F], `receptance.weight`: [D, D].
    """

    def __init__(self, name, config: RWKVConfig):
        super().__init__(name)
        hidden_size = config.hidden_size
        self.shift = TokenShift(name, hidden_size, ("key", "receptance"))
        self.key = Linear(f"{name}.key", hidden_size, config.intermediate_size, bias=False, shard="column")
        self.value = Linear(f"{name}.value", config.intermediate_size, hidden_size, bias=False, shard="row")
        self.receptance = Linear(f"{name}.receptance", hidden_size, hidden_size, bias=False)

    def forward(self, x, tokens):
        """x: [B, T, D], tokens: DecoderTokens whose states hold this layer's -> [B, T, D]."""
        for_key, for_receptance = self.shift(x, tokens)
        key = ops.relu(self.key(for_key))
        return ops.sigmoid(self.receptance(for_receptance)) * self.value(key * key)


class RWKVBlock(BaseLayer):
    """One block: attention, then feed-forward, each on the normed input and added to it.

    Checkpoint keys: `ln1`, `attention`, `ln2`, `feed_forward`.
    """

    def __init__(self, name, config: RWKVConfig):
        super().__init__(name)
        self.attention_norm = LayerNorm(f"{name}.ln1", config.hidden_size, config.norm_eps)
        self.attention = RWKVAttention(f"{name}.attention", config)
        self.feed_forward_norm = LayerNorm(f"{name}.ln2", config.hidden_size, config.norm_eps)
        self.feed_forward = RWKVFeedForward(f"{name}.feed_forward", config)

    def forward(self, x, tokens):
        """x: [B, T, D], tokens: DecoderTokens -> [B, T, D]."""
        x = x + self.attention(self.attention_norm(x), tokens)
        return x + self.feed_forward(self.feed_forward_norm(x), tokens)


class RWKV(DecoderModel):
    """RWKV-4 with its language-model head.

    The residual stream grows from layer to layer, in trained models beyond what float16 holds. So every `rescale_every` layers
    it is halved, and what later layers add to it is made smaller on load by the same powers of two; only the norms' eps, which
    stays, tells the difference.
    """

    config_class = RWKVConfig
    has_positions = False
    has_kv_cache = False
    memory = "recurrent state"

    def __init__(self, config: RWKVConfig):
        super().__init__("rwkv", config)
        self.embedding = Embedding("rwkv.embeddings", config.vocab_size, config.hidden_size, "vocab", config.is_tied)
        self.embedding_norm = LayerNorm("rwkv.blocks.0.pre_ln", config.hidden_size, config.norm_eps)
        self.blocks = [RWKVBlock(f"rwkv.blocks.{i}", config) for i in range(config.num_layers)]
        self.final_norm = LayerNorm("rwkv.ln_out", config.hidden_size, FINAL_NORM_EPS)
        tied = self.embedding.weight if config.is_tied else None
        self.lm_head = LMHead("head", config.hidden_size, config.vocab_size, tied)
        if config.is_tied:
            self.ignored_keys += (r"head\.weight",)  # some checkpoints hold the tied weight twice

    def forward(self, ids, tokens):
        x = self.embedding_norm(self.embedding(ids))
        for block, num_done in zip(self.blocks, range(1, len(self.blocks) + 1), strict=True):
            x = block(x, tokens)
            if self.config.rescale_every and num_done % self.config.rescale_every == 0:
                x = x * 0.5
        return self.final_norm(x)

    def head(self, hidden):
        return self.lm_head(hidden)

    # ---- checkpoint

    @staticmethod
    def config_from_weights(checkpoint) -> dict | None:
        """What config.json would say of an original .pth, which comes alone; None for a checkpoint of another family.

        Raises: UnsupportedError for a later RWKV.
        """
        names = set(checkpoint.names())
        layers = [int(match[1]) for name in names if (match := re.match(r"blocks\.(\d+)\.att\.", name))]
        if not layers or "emb.weight" not in names:
            return None
        lacking = {"blocks.0.att.time_decay", "blocks.0.att.time_first", "blocks.0.ffn.key.weight"} - names
        if lacking or "blocks.0.att.ln_x.weight" in names:
            raise UnsupportedError(f"{checkpoint.path}: the weights are of an RWKV that is not supported; RWKV-4 is")
        vocab_size, hidden_size = _matrix(checkpoint, "emb.weight")
        sizes = {
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "attention_hidden_size": checkpoint.shape("blocks.0.att.time_decay")[-1],
            "intermediate_size": _matrix(checkpoint, "blocks.0.ffn.key.weight")[0],
            "num_hidden_layers": max(layers) + 1,
        }
        logger.info(
            "%s: no config.json: sizes are read off the weights, and the rest is as in RWKV's own models: %s",
            checkpoint.path, ", ".join(f"{key} {value}" for key, value in ORIGINAL.items() if key != "model_type"),
        )  # fmt: skip
        return ORIGINAL | sizes

    def checkpoint_keys(self, parameter_name):
        bare = parameter_name.removeprefix("rwkv.")
        original = ".".join(ORIGINAL_NAMES.get(part, part) for part in bare.split("."))
        return tuple(dict.fromkeys((parameter_name, bare, original, f"rwkv.{original}")))

    def transform(self, parameter_name, array):
        layer = re.fullmatch(r"rwkv\.blocks\.(\d+)\.(attention\.output|feed_forward\.value)\.weight", parameter_name)
        if layer is None or not self.config.rescale_every:
            return array
        return np.ldexp(array, -(int(layer[1]) // self.config.rescale_every))

    def shape_meaning(self, parameter_name):
        suffix = re.sub(r"rwkv\.(blocks\.\d+\.)?", "", parameter_name)
        to_attention = "(attention_hidden_size, hidden_size)"
        return {
            "embeddings.weight": "(vocab_size, hidden_size)",
            "head.weight": "(vocab_size, hidden_size)",
            "attention.time_decay": "(attention_hidden_size,)",
            "attention.time_first": "(attention_hidden_size,)",
            "attention.key.weight": to_attention,
            "attention.value.weight": to_attention,
            "attention.receptance.weight": to_attention,
            "attention.output.weight": "(hidden_size, attention_hidden_size)",
            "feed_forward.key.weight": "(intermediate_size, hidden_size)",
            "feed_forward.value.weight": "(hidden_size, intermediate_size)",
            "feed_forward.receptance.weight": "(hidden_size, hidden_size)",
        }.get(suffix, "(1, 1, hidden_size)" if ".time_mix_" in suffix else "")


def _matrix(checkpoint, name):
    shape = checkpoint.shape(name)
    if len(shape) != 2:
        raise UserError(f"{checkpoint.path}: {name} has shape {shape}, which should be that of a matrix")
    return shape

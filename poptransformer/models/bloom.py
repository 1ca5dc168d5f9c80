"""BLOOM: no positions but ALiBi, scores that fall with distance by a slope of each head's own.

Source: BigScience Workshop 2022, arXiv:2211.05100; Press et al. 2021 (ALiBi), arXiv:2108.12409; HF modeling_bloom.py.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from poptransformer.errors import UnsupportedError
from poptransformer.layers import MLP, Attention, BaseLayer, Embedding, LayerNorm, LMHead
from poptransformer.models.config import ConfigReader
from poptransformer.models.decoder_model import DecoderModel
from poptransformer.models.fused_qkv import part_by_part

# Nothing in the model ends a row; float32, in which distances are multiplied by slopes, counts exactly up to here.
MAX_SEQ_LEN = 2**24


@dataclasses.dataclass(frozen=True)
class BloomConfig:
    """Sizes and switches of a BLOOM, with their keys in the Hugging Face config where those differ."""

    vocab_size: int
    hidden_size: int  # n_embed or hidden_size
    num_layers: int  # n_layer or num_hidden_layers
    num_heads: int  # n_head or num_attention_heads
    norm_eps: float  # layer_norm_epsilon
    is_tied: bool  # tie_word_embeddings
    use_normed_residual: bool  # apply_residual_connection_post_layernorm
    max_seq_len: int = MAX_SEQ_LEN

    @classmethod
    def from_hf(cls, config: dict) -> BloomConfig:
        """Read a config.json. Raises: UserError naming all keys that are missing or wrong; UnsupportedError."""
        with ConfigReader(config) as read:
            # Without slow_but_exact the number of ranks of the training run changes nothing.
            num_parts = read.size("pretraining_tp", default=1)
            if read.switch("slow_but_exact", False) and num_parts != 1:
                raise UnsupportedError(
                    f"config.json: slow_but_exact: true with pretraining_tp={num_parts} is not supported; "
                    "set slow_but_exact: false, with which the released models run"
                )
            hidden_size, num_heads = read.size("n_embed", "hidden_size"), read.size("n_head", "num_attention_heads")
            read.check_multiple("hidden_size", hidden_size, "n_head", num_heads)
            return cls(
                vocab_size=read.size("vocab_size"),
                hidden_size=hidden_size,
                num_layers=read.num_layers("n_layer", "num_hidden_layers"),
                num_heads=num_heads,
                norm_eps=read.number("layer_norm_epsilon", 1e-5),
                is_tied=read.switch("tie_word_embeddings", True),
                use_normed_residual=read.switch("apply_residual_connection_post_layernorm", False),
            )


def alibi_slopes(num_heads: int) -> np.ndarray:
    """[N] float32: 2 ** (-8 i / n) for i = 1 .. n, where n is the largest power of two that is at most N.

    The N - n heads beyond take every other slope of the series for 2n heads, from its first on, as the paper's code does.
    """

    def series(count):
        return 2.0 ** (-8.0 * np.arange(1, count + 1) / count)

    power = 1 << (num_heads.bit_length() - 1)
    return np.concatenate([series(power), series(2 * power)[::2][: num_heads - power]]).astype(np.float32)


class BloomBlock(BaseLayer):
    """One block: attention, then MLP, each on the normed input and added to it, or to its norm (use_normed_residual).

    Checkpoint keys: `input_layernorm`, `self_attention.query_key_value` (rows head by head), `self_attention.dense`,
    `post_attention_layernorm`, `mlp.dense_h_to_4h`, `mlp.dense_4h_to_h`.
    """

    def __init__(self, name, config: BloomConfig):
        super().__init__(name)
        self.use_normed_residual = config.use_normed_residual
        self.input_norm = LayerNorm(f"{name}.input_layernorm", config.hidden_size, config.norm_eps)
        self.attention = Attention(
            f"{name}.self_attention", config.hidden_size, config.num_heads, qkv=("query_key_value",), out="dense",
            alibi_slopes=alibi_slopes(config.num_heads),
        )  # fmt: skip
        self.post_attention_norm = LayerNorm(f"{name}.post_attention_layernorm", config.hidden_size, config.norm_eps)
        self.mlp = MLP(
            f"{name}.mlp", config.hidden_size, 4 * config.hidden_size, "gelu_new", up="dense_h_to_4h", down="dense_4h_to_h"
        )

    def forward(self, x, tokens):
        """x: [B, T, D], tokens: DecoderTokens -> [B, T, D]."""
        normed = self.input_norm(x)
        x = (normed if self.use_normed_residual else x) + self.attention(normed, tokens)
        normed = self.post_attention_norm(x)
        return (normed if self.use_normed_residual else x) + self.mlp(normed)


class Bloom(DecoderModel):
    """A BLOOM with its language-model head."""

    config_class = BloomConfig

    def __init__(self, config: BloomConfig):
        name, width = "transformer", config.hidden_size
        super().__init__(name, config)
        self.token_embedding = Embedding(f"{name}.word_embeddings", config.vocab_size, width, "vocab", config.is_tied)
        self.embedding_norm = LayerNorm(f"{name}.word_embeddings_layernorm", width, config.norm_eps)
        self.blocks = [BloomBlock(f"{name}.h.{i}", config) for i in range(config.num_layers)]
        self.final_norm = LayerNorm(f"{name}.ln_f", width, config.norm_eps)
        self.lm_head = LMHead("lm_head", width, config.vocab_size, self.token_embedding.weight if config.is_tied else None)
        if config.is_tied:
            self.ignored_keys += (r"lm_head\.weight",)  # some checkpoints hold the tied weight twice

    def forward(self, ids, tokens):
        x = self.embedding_norm(self.token_embedding(ids))
        for block in self.blocks:
            x = block(x, tokens)
        return self.final_norm(x)

    def head(self, hidden):
        return self.lm_head(hidden)

    # ---- checkpoint

    def checkpoint_keys(self, parameter_name):
        return (parameter_name, parameter_name.removeprefix("transformer."))

    def row_order(self, parameter_name):
        if ".query_key_value." in parameter_name:
            return part_by_part(3 * self.config.hidden_size, self.config.num_heads)
        return None

    def shape_meaning(self, parameter_name):
        return {
            "word_embeddings.weight": "(vocab_size, hidden_size)",
            "query_key_value.weight": "(3 * hidden_size, hidden_size)",
            "dense_h_to_4h.weight": "(4 * hidden_size, hidden_size)",
            "dense_4h_to_h.weight": "(hidden_size, 4 * hidden_size)",
        }.get(".".join(parameter_name.split(".")[-2:]), "")

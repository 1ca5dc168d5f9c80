"""GPT-2: learned positions, pre-norm blocks, a head tied to the embedding.

Source: Radford et al. 2019, "Language models are unsupervised multitask learners"; HF modeling_gpt2.py.
"""

from __future__ import annotations

import dataclasses
import math

from poptransformer.errors import UnsupportedError, UserError
from poptransformer.layers import MLP, Attention, BaseLayer, Embedding, LayerNorm, LMHead
from poptransformer.models.config import read_bool, read_config, read_number
from poptransformer.models.decoder_model import DecoderModel


@dataclasses.dataclass(frozen=True)
class GPT2Config:
    """Sizes and switches of a GPT-2, with their keys in the Hugging Face config."""

    vocab_size: int
    hidden_size: int  # n_embd
    num_layers: int  # n_layer
    num_heads: int  # n_head
    max_seq_len: int  # n_positions
    intermediate_size: int  # n_inner; None there means 4 * n_embd
    activation: str  # activation_function
    norm_eps: float  # layer_norm_epsilon
    is_tied: bool  # tie_word_embeddings
    use_scale: bool  # scale_attn_weights
    use_inverse_layer_scale: bool  # scale_attn_by_inverse_layer_idx

    @classmethod
    def from_hf(cls, config: dict) -> GPT2Config:
        """Read a config.json.

        Raises: UserError naming the keys that are missing; UnsupportedError for cross-attention.
        """
        if config.get("add_cross_attention"):
            raise UnsupportedError("add_cross_attention: true is not supported; this is a decoder without an encoder")
        optional = {} if config.get("n_inner") is None else {"intermediate_size": "n_inner"}
        sizes = read_config(
            {"n_positions": 1024} | config, vocab_size="vocab_size", hidden_size="n_embd", num_layers="n_layer",
            num_heads="n_head", max_seq_len="n_positions", **optional,
        )  # fmt: skip
        if sizes["hidden_size"] % sizes["num_heads"]:
            raise UserError(f"config.json: n_embd={sizes['hidden_size']} is not a multiple of n_head={sizes['num_heads']}")
        return cls(
            **{"intermediate_size": 4 * sizes["hidden_size"]} | sizes,
            activation=config.get("activation_function", "gelu_new"),
            norm_eps=read_number(config, "layer_norm_epsilon", 1e-5),
            is_tied=read_bool(config, "tie_word_embeddings", True),
            use_scale=read_bool(config, "scale_attn_weights", True),
            use_inverse_layer_scale=read_bool(config, "scale_attn_by_inverse_layer_idx", False),
        )


class GPT2Block(BaseLayer):
    """One block: attention, then MLP, each on the normed input and added to it.

    Checkpoint keys: `ln_1`, `attn.c_attn` (query, key and value fused), `attn.c_proj`, `ln_2`, `mlp.c_fc`, `mlp.c_proj`.
    """

    def __init__(self, name, config: GPT2Config, layer_index: int):
        super().__init__(name)
        scale = 1 / math.sqrt(config.hidden_size // config.num_heads) if config.use_scale else 1.0
        if config.use_inverse_layer_scale:
            scale /= layer_index + 1
        self.input_norm = LayerNorm(f"{name}.ln_1", config.hidden_size, config.norm_eps)
        self.attention = Attention(
            f"{name}.attn", config.hidden_size, config.num_heads, scale=scale, qkv=("c_attn",), out="c_proj"
        )
        self.post_attention_norm = LayerNorm(f"{name}.ln_2", config.hidden_size, config.norm_eps)
        self.mlp = MLP(f"{name}.mlp", config.hidden_size, config.intermediate_size, config.activation, up="c_fc", down="c_proj")

    def forward(self, x, tokens):
        """x: [B, T, D], tokens: DecoderTokens -> [B, T, D]."""
        x = x + self.attention(self.input_norm(x), tokens)
        return x + self.mlp(self.post_attention_norm(x))


class GPT2(DecoderModel):
    """GPT-2 with its language-model head."""

    config_class = GPT2Config
    # Causal masks that older versions of the original code saved as buffers.
    ignored_keys = (r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",)

    def __init__(self, config: GPT2Config):
        super().__init__("transformer", config)
        self.token_embedding = Embedding("transformer.wte", config.vocab_size, config.hidden_size, "vocab", config.is_tied)
        self.position_embedding = Embedding("transformer.wpe", config.max_seq_len, config.hidden_size)
        self.blocks = [GPT2Block(f"transformer.h.{i}", config, i) for i in range(config.num_layers)]
        self.final_norm = LayerNorm("transformer.ln_f", config.hidden_size, config.norm_eps)
        tied = self.token_embedding.weight if config.is_tied else None
        self.lm_head = LMHead("lm_head", config.hidden_size, config.vocab_size, tied)
        if config.is_tied:
            self.ignored_keys += (r"lm_head\.weight",)  # some checkpoints hold the tied weight twice

    def forward(self, ids, tokens):
        x = self.token_embedding(ids) + self.position_embedding(tokens.position_ids)
        for block in self.blocks:
            x = block(x, tokens)
        return self.final_norm(x)

    def head(self, hidden):
        return self.lm_head(hidden)

    # ---- checkpoint

    def checkpoint_keys(self, parameter_name):
        return (parameter_name, parameter_name.removeprefix("transformer."))

    def is_transposed(self, parameter_name):
        return parameter_name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))  # Conv1D: [in, out]

    def shape_meaning(self, parameter_name):
        suffix = parameter_name.split(".h.")[-1].partition(".")[2] if ".h." in parameter_name else parameter_name
        return {
            "transformer.wte.weight": "(vocab_size, n_embd)",
            "transformer.wpe.weight": "(n_positions, n_embd)",
            "lm_head.weight": "(vocab_size, n_embd)",
            "attn.c_attn.weight": "(n_embd, 3 * n_embd)",
            "attn.c_proj.weight": "(n_embd, n_embd)",
            "mlp.c_fc.weight": "(n_embd, n_inner)",
            "mlp.c_proj.weight": "(n_inner, n_embd)",
        }.get(suffix, "")

"""OPT and Galactica: learned positions, norms before (or, in OPT-350M, after) each half of a block.

Source: Zhang et al. 2022, arXiv:2205.01068; Taylor et al. 2022, arXiv:2211.09085; HF modeling_opt.py.
"""

from __future__ import annotations

import dataclasses

from poptransformer.layers import MLP, Attention, BaseLayer, Embedding, LayerNorm, Linear, LMHead
from poptransformer.models.config import ConfigReader
from poptransformer.models.decoder_model import DecoderModel

POSITION_OFFSET = 2  # the table's first rows, once of padding, belong to no position
NORM_EPS = 1e-5  # no key in the config


@dataclasses.dataclass(frozen=True)
class OPTConfig:
    """Sizes and switches of an OPT, with their keys in the Hugging Face config where those differ."""

    vocab_size: int
    hidden_size: int
    embedding_size: int  # word_embed_proj_dim; None there means hidden_size
    intermediate_size: int  # ffn_dim
    num_layers: int  # num_hidden_layers
    num_heads: int  # num_attention_heads
    max_seq_len: int  # max_position_embeddings
    activation: str  # activation_function
    is_tied: bool  # tie_word_embeddings
    is_pre_norm: bool  # do_layer_norm_before
    use_final_norm: bool  # do_layer_norm_before and not _remove_final_layer_norm
    use_bias: bool  # enable_bias
    use_norm_weights: bool  # layer_norm_elementwise_affine

    @classmethod
    def from_hf(cls, config: dict) -> OPTConfig:
        """Read a config.json. Raises: UserError naming all keys that are missing or wrong."""
        with ConfigReader(config) as read:
            hidden_size, num_heads = read.size("hidden_size"), read.size("num_attention_heads")
            read.check_multiple("hidden_size", hidden_size, "num_attention_heads", num_heads)
            is_pre_norm = read.switch("do_layer_norm_before", True)
            return cls(
                vocab_size=read.size("vocab_size"),
                hidden_size=hidden_size,
                embedding_size=read.size("word_embed_proj_dim", default=hidden_size),
                intermediate_size=read.size("ffn_dim"),
                num_layers=read.num_layers("num_hidden_layers"),
                num_heads=num_heads,
                max_seq_len=read.size("max_position_embeddings", default=2048),
                activation=config.get("activation_function", "relu"),
                is_tied=read.switch("tie_word_embeddings", True),
                is_pre_norm=is_pre_norm,
                use_final_norm=not read.switch("_remove_final_layer_norm", False) and is_pre_norm,
                use_bias=read.switch("enable_bias", True),
                use_norm_weights=read.switch("layer_norm_elementwise_affine", True),
            )

    def norm(self, name: str) -> LayerNorm:
        """A LayerNorm as all of the model's are."""
        return LayerNorm(name, self.hidden_size, NORM_EPS, has_weights=self.use_norm_weights)


class OPTBlock(BaseLayer):
    """One block: attention, then MLP, with the norm before each or after it.

    Checkpoint keys: `self_attn.{q,k,v,out}_proj`, `self_attn_layer_norm`, `fc1`, `fc2`, `final_layer_norm`.
    """

    def __init__(self, name, config: OPTConfig):
        super().__init__(name)
        self.is_pre_norm = config.is_pre_norm
        self.attention = Attention(
            f"{name}.self_attn", config.hidden_size, config.num_heads, out="out_proj", bias=config.use_bias
        )
        self.attention_norm = config.norm(f"{name}.self_attn_layer_norm")
        self.mlp = MLP(
            name, config.hidden_size, config.intermediate_size, config.activation, up="fc1", down="fc2", bias=config.use_bias
        )
        self.mlp_norm = config.norm(f"{name}.final_layer_norm")

    def forward(self, x, tokens):
        """x: [B, T, D], tokens: DecoderTokens -> [B, T, D]."""
        if self.is_pre_norm:
            x = x + self.attention(self.attention_norm(x), tokens)
            return x + self.mlp(self.mlp_norm(x))
        x = self.attention_norm(x + self.attention(x, tokens))
        return self.mlp_norm(x + self.mlp(x))


class OPT(DecoderModel):
    """An OPT with its language-model head."""

    config_class = OPTConfig

    def __init__(self, config: OPTConfig):
        name, width = "model.decoder", config.hidden_size
        super().__init__(name, config)
        self.token_embedding = Embedding(
            f"{name}.embed_tokens", config.vocab_size, config.embedding_size, "vocab", config.is_tied
        )
        self.position_embedding = Embedding(f"{name}.embed_positions", config.max_seq_len + POSITION_OFFSET, width)
        self.project_in = self.project_out = None
        if config.embedding_size != width:
            self.project_in = Linear(f"{name}.project_in", config.embedding_size, width, bias=False)
            self.project_out = Linear(f"{name}.project_out", width, config.embedding_size, bias=False)
        self.blocks = [OPTBlock(f"{name}.layers.{i}", config) for i in range(config.num_layers)]
        self.final_norm = config.norm(f"{name}.final_layer_norm") if config.use_final_norm else None
        tied = self.token_embedding.weight if config.is_tied else None
        self.lm_head = LMHead("lm_head", config.embedding_size, config.vocab_size, tied)
        if config.is_tied:
            self.ignored_keys += (r"lm_head\.weight",)  # some checkpoints hold the tied weight twice

    def forward(self, ids, tokens):
        x = self.token_embedding(ids)
        x = self.project_in(x) if self.project_in else x
        x = x + self.position_embedding(tokens.position_ids + POSITION_OFFSET)
        for block in self.blocks:
            x = block(x, tokens)
        x = self.final_norm(x) if self.final_norm else x
        return self.project_out(x) if self.project_out else x

    def head(self, hidden):
        return self.lm_head(hidden)

    # ---- checkpoint

    def checkpoint_keys(self, parameter_name):
        return tuple(dict.fromkeys(parameter_name.removeprefix(prefix) for prefix in ("", "model.", "model.decoder.")))

    def shape_meaning(self, parameter_name):
        return {
            "embed_tokens.weight": "(vocab_size, word_embed_proj_dim)",
            "embed_positions.weight": f"(max_position_embeddings + {POSITION_OFFSET}, hidden_size)",
            "project_in.weight": "(hidden_size, word_embed_proj_dim)",
            "project_out.weight": "(word_embed_proj_dim, hidden_size)",
            "fc1.weight": "(ffn_dim, hidden_size)",
            "fc2.weight": "(hidden_size, ffn_dim)",
        }.get(".".join(parameter_name.split(".")[-2:]), "")

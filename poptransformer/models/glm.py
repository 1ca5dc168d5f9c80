"""GLM-4 in its Hugging Face form (model_type glm): as Llama, with a fused gate and up, and half of each head turning in pairs.

Source: GLM team 2024, arXiv:2406.12793; HF modeling_glm.py.
"""

from __future__ import annotations

import dataclasses

from poptransformer.layers import Attention, BaseLayer, Embedding, GatedMLP, LMHead, RMSNorm, Rope
from poptransformer.models.config import ConfigReader
from poptransformer.models.decoder_model import DecoderModel
from poptransformer.models.rope_scaling import RopeScaling
from poptransformer.register import REGISTER


@dataclasses.dataclass(frozen=True)
class GLMConfig:
    """Sizes and switches of a GLM-4, with their keys in the Hugging Face config where those differ."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int  # num_hidden_layers
    num_heads: int  # num_attention_heads
    num_kv_heads: int  # num_key_value_heads
    head_dim: int
    max_seq_len: int  # max_position_embeddings
    activation: str  # hidden_act
    norm_eps: float  # rms_norm_eps
    is_tied: bool  # tie_word_embeddings
    qkv_bias: bool  # attention_bias
    rope: RopeScaling  # rope_theta and partial_rotary_factor with rope_scaling, or rope_parameters

    @property
    def why_not_longer(self) -> str:
        """Why rows end at max_seq_len, where the config reads as if they could go on."""
        return self.rope.why_not_longer

    @classmethod
    def from_hf(cls, config: dict) -> GLMConfig:
        """Read a config.json. Raises: UserError naming all keys that are missing or wrong; UnsupportedError."""
        with ConfigReader(config) as read:
            num_heads, num_kv_heads = read.size("num_attention_heads"), read.size("num_key_value_heads", default=2)
            read.check_multiple("num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads)
            max_seq_len = read.size("max_position_embeddings", default=131072)
            return cls(
                vocab_size=read.size("vocab_size"),
                hidden_size=read.size("hidden_size"),
                intermediate_size=read.size("intermediate_size"),
                num_layers=read.num_layers("num_hidden_layers"),
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=read.size("head_dim", default=128),
                max_seq_len=max_seq_len,
                activation=config.get("hidden_act", "silu"),
                norm_eps=read.number("rms_norm_eps", 1.5625e-7),
                is_tied=read.switch("tie_word_embeddings", False),
                qkv_bias=read.switch("attention_bias", True),
                rope=RopeScaling.from_hf(config, max_seq_len, default_share=0.5),
            )


class GLMBlock(BaseLayer):
    """One block: attention, then MLP, each on the normed input and added to it.

    Checkpoint keys: `input_layernorm`, `self_attn.{q,k,v,o}_proj`, `post_attention_layernorm`, `mlp.gate_up_proj` (gate rows,
    then up rows), `mlp.down_proj`.
    """

    def __init__(self, name, config: GLMConfig, rope: Rope):
        super().__init__(name)
        self.input_norm = RMSNorm(f"{name}.input_layernorm", config.hidden_size, config.norm_eps)
        self.attention = Attention(
            f"{name}.self_attn", config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim,
            bias=config.qkv_bias, out_bias=False, rope=rope,
        )  # fmt: skip
        self.post_attention_norm = RMSNorm(f"{name}.post_attention_layernorm", config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(
            f"{name}.mlp", config.hidden_size, config.intermediate_size, config.activation, gate_up="gate_up_proj", bias=False
        )

    def forward(self, x, tokens):
        """x: [B, T, D], tokens: DecoderTokens -> [B, T, D]."""
        x = x + self.attention(self.input_norm(x), tokens)
        return x + self.mlp(self.post_attention_norm(x))


class GLM(DecoderModel):
    """A GLM-4 with its language-model head."""

    config_class = GLMConfig

    def __init__(self, config: GLMConfig):
        super().__init__("model", config)
        rope = dataclasses.replace(config.rope.rope(config.head_dim, REGISTER.max_length), interleaved=True)
        self.token_embedding = Embedding("model.embed_tokens", config.vocab_size, config.hidden_size, "vocab", config.is_tied)
        self.blocks = [GLMBlock(f"model.layers.{i}", config, rope) for i in range(config.num_layers)]
        self.final_norm = RMSNorm("model.norm", config.hidden_size, config.norm_eps)
        tied = self.token_embedding.weight if config.is_tied else None
        self.lm_head = LMHead("lm_head", config.hidden_size, config.vocab_size, tied)
        if config.is_tied:
            self.ignored_keys += (r"lm_head\.weight",)  # some checkpoints hold the tied weight twice

    def forward(self, ids, tokens):
        x = self.token_embedding(ids)
        for block in self.blocks:
            x = block(x, tokens)
        return self.final_norm(x)

    def head(self, hidden):
        return self.lm_head(hidden)

    # ---- checkpoint

    def checkpoint_keys(self, parameter_name):
        return (parameter_name, parameter_name.removeprefix("model."))

    def shape_meaning(self, parameter_name):
        return {
            "embed_tokens.weight": "(vocab_size, hidden_size)",
            "lm_head.weight": "(vocab_size, hidden_size)",
            "q_proj.weight": "(num_attention_heads * head_dim, hidden_size)",
            "k_proj.weight": "(num_key_value_heads * head_dim, hidden_size)",
            "v_proj.weight": "(num_key_value_heads * head_dim, hidden_size)",
            "o_proj.weight": "(hidden_size, num_attention_heads * head_dim)",
            "gate_up_proj.weight": "(2 * intermediate_size, hidden_size)",
            "down_proj.weight": "(hidden_size, intermediate_size)",
        }.get(".".join(parameter_name.split(".")[-2:]), "")

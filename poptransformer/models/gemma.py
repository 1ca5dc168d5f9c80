"""Gemma 1: a Llama with scaled embeddings, norms around one, wide heads and a GELU gate.

Source: Gemma Team 2024, arXiv:2403.08295; HF modeling_gemma.py.
"""

from __future__ import annotations

import dataclasses
import math

from poptransformer.errors import UnsupportedError
from poptransformer.layers import Attention, BaseLayer, Embedding, GatedMLP, LMHead, RMSNorm, Rope
from poptransformer.models.config import ConfigReader
from poptransformer.models.decoder_model import DecoderModel
from poptransformer.models.rope_scaling import RopeScaling
from poptransformer.register import REGISTER


@dataclasses.dataclass(frozen=True)
class GemmaConfig:
    """Sizes and switches of a Gemma, with their keys in the Hugging Face config where those differ."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int  # num_hidden_layers
    num_heads: int  # num_attention_heads
    num_kv_heads: int  # num_key_value_heads
    head_dim: int
    max_seq_len: int  # max_position_embeddings
    activation: str  # hidden_activation or hidden_act
    norm_eps: float  # rms_norm_eps
    is_tied: bool  # tie_word_embeddings
    attention_bias: bool
    rope: RopeScaling  # rope_theta with rope_scaling, or rope_parameters

    @property
    def why_not_longer(self) -> str:
        """Why rows end at max_seq_len, where the config reads as if they could go on."""
        return self.rope.why_not_longer

    @classmethod
    def from_hf(cls, config: dict) -> GemmaConfig:
        """Read a config.json. Raises: UserError naming all keys that are missing or wrong; UnsupportedError."""
        if config.get("use_bidirectional_attention"):
            raise UnsupportedError("config.json: use_bidirectional_attention: true is not supported; this is a decoder")
        with ConfigReader(config) as read:
            num_heads, num_kv_heads = read.size("num_attention_heads"), read.size("num_key_value_heads", default=16)
            read.check_multiple("num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads)
            max_seq_len = read.size("max_position_embeddings", default=8192)
            return cls(
                vocab_size=read.size("vocab_size"),
                hidden_size=read.size("hidden_size"),
                intermediate_size=read.size("intermediate_size"),
                num_layers=read.num_layers("num_hidden_layers"),
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=read.size("head_dim", default=256),
                max_seq_len=max_seq_len,
                activation=_activation(read),
                norm_eps=read.number("rms_norm_eps", 1e-6),
                is_tied=read.switch("tie_word_embeddings", True),
                attention_bias=read.switch("attention_bias", False),
                rope=RopeScaling.from_hf(config, max_seq_len),
            )


def _activation(read):
    """The first releases say hidden_act: gelu and mean its tanh form, which is also what they were trained with."""
    given = [read.config[key] for key in ("hidden_activation", "hidden_act") if read.config.get(key) is not None]
    names = ["gelu_pytorch_tanh" if name == "gelu" else name for name in given]
    if len(names) == 2 and names[0] != names[1]:
        read.problem(f"hidden_activation and hidden_act differ, {names[0]!r} and {names[1]!r}: set one of them")
    return names[0] if names else "gelu_pytorch_tanh"


class GemmaBlock(BaseLayer):
    """One block: attention, then MLP, each on the normed input and added to it.

    Checkpoint keys: `input_layernorm`, `self_attn.{q,k,v,o}_proj`, `post_attention_layernorm`, `mlp.{gate,up,down}_proj`.
    """

    def __init__(self, name, config: GemmaConfig, rope: Rope):
        super().__init__(name)
        self.input_norm = RMSNorm(f"{name}.input_layernorm", config.hidden_size, config.norm_eps, is_wide=True)
        self.attention = Attention(
            f"{name}.self_attn", config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim,
            bias=config.attention_bias, rope=rope,
        )  # fmt: skip
        self.post_attention_norm = RMSNorm(
            f"{name}.post_attention_layernorm", config.hidden_size, config.norm_eps, is_wide=True
        )
        self.mlp = GatedMLP(f"{name}.mlp", config.hidden_size, config.intermediate_size, config.activation, bias=False)

    def forward(self, x, tokens):
        """x: [B, T, D], tokens: DecoderTokens -> [B, T, D]."""
        x = x + self.attention(self.input_norm(x), tokens)
        return x + self.mlp(self.post_attention_norm(x))


class Gemma(DecoderModel):
    """A Gemma with its language-model head."""

    config_class = GemmaConfig
    ignored_keys = (r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)  # a buffer that older versions saved

    def __init__(self, config: GemmaConfig):
        super().__init__("model", config)
        rope = config.rope.rope(config.head_dim, REGISTER.max_length)
        self.token_embedding = Embedding("model.embed_tokens", config.vocab_size, config.hidden_size, "vocab", config.is_tied)
        self.blocks = [GemmaBlock(f"model.layers.{i}", config, rope) for i in range(config.num_layers)]
        self.final_norm = RMSNorm("model.norm", config.hidden_size, config.norm_eps, is_wide=True)
        tied = self.token_embedding.weight if config.is_tied else None
        self.lm_head = LMHead("lm_head", config.hidden_size, config.vocab_size, tied)
        if config.is_tied:
            self.ignored_keys += (r"lm_head\.weight",)  # some checkpoints hold the tied weight twice

    def forward(self, ids, tokens):
        x = self.token_embedding(ids) * math.sqrt(self.config.hidden_size)  # rounded to the dtype of x, as it was trained
        for block in self.blocks:
            x = block(x, tokens)
        return self.final_norm(x)

    def head(self, hidden):
        return self.lm_head(hidden)

    # ---- checkpoint

    def checkpoint_keys(self, parameter_name):
        return (parameter_name, parameter_name.removeprefix("model."))

    def transform(self, parameter_name, array):
        return array + 1 if "norm" in parameter_name else array  # checkpoints hold how far the factors are from one

    def shape_meaning(self, parameter_name):
        return {
            "embed_tokens.weight": "(vocab_size, hidden_size)",
            "q_proj.weight": "(num_attention_heads * head_dim, hidden_size)",
            "k_proj.weight": "(num_key_value_heads * head_dim, hidden_size)",
            "v_proj.weight": "(num_key_value_heads * head_dim, hidden_size)",
            "o_proj.weight": "(hidden_size, num_attention_heads * head_dim)",
            "gate_proj.weight": "(intermediate_size, hidden_size)",
            "up_proj.weight": "(intermediate_size, hidden_size)",
            "down_proj.weight": "(hidden_size, intermediate_size)",
        }.get(".".join(parameter_name.split(".")[-2:]), "")

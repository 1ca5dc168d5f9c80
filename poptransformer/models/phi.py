"""Phi 1, 1.5 and 2: attention and MLP side by side on the same normed input, rotary positions on part of each head.

Source: Gunasekar et al. 2023, arXiv:2306.11644; HF modeling_phi.py.
"""

from __future__ import annotations

import dataclasses

from poptransformer.layers import MLP, Attention, BaseLayer, Embedding, LayerNorm, LMHead, Rope
from poptransformer.models.config import ConfigReader
from poptransformer.models.decoder_model import DecoderModel
from poptransformer.models.rope_scaling import RopeScaling
from poptransformer.register import REGISTER


@dataclasses.dataclass(frozen=True)
class PhiConfig:
    """Sizes and switches of a Phi, with their keys in the Hugging Face config where those differ."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int  # num_hidden_layers
    num_heads: int  # num_attention_heads
    num_kv_heads: int  # num_key_value_heads; None there means num_attention_heads
    max_seq_len: int  # max_position_embeddings
    activation: str  # hidden_act
    norm_eps: float  # layer_norm_eps
    is_tied: bool  # tie_word_embeddings
    use_qk_norm: bool  # qk_layernorm
    rope: RopeScaling  # rope_theta and partial_rotary_factor with rope_scaling, or rope_parameters

    @property
    def why_not_longer(self) -> str:
        """Why rows end at max_seq_len, where the config reads as if they could go on."""
        return self.rope.why_not_longer

    @classmethod
    def from_hf(cls, config: dict) -> PhiConfig:
        """Read a config.json. Raises: UserError naming all keys that are missing or wrong; UnsupportedError."""
        with ConfigReader(config) as read:
            hidden_size, num_heads = read.size("hidden_size"), read.size("num_attention_heads")
            num_kv_heads = read.size("num_key_value_heads", default=num_heads)
            read.check_multiple("hidden_size", hidden_size, "num_attention_heads", num_heads)
            read.check_multiple("num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads)
            max_seq_len = read.size("max_position_embeddings", default=2048)
            return cls(
                vocab_size=read.size("vocab_size"),
                hidden_size=hidden_size,
                intermediate_size=read.size("intermediate_size"),
                num_layers=read.num_layers("num_hidden_layers"),
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                max_seq_len=max_seq_len,
                activation=config.get("hidden_act", "gelu_new"),
                norm_eps=read.number("layer_norm_eps", 1e-5),
                is_tied=read.switch("tie_word_embeddings", False),
                use_qk_norm=read.switch("qk_layernorm", False),
                rope=RopeScaling.from_hf(config, max_seq_len, default_share=0.5),
            )


class PhiBlock(BaseLayer):
    """One block: attention and MLP of the same normed input, both added to what came in.

    Checkpoint keys: `input_layernorm`, `self_attn.{q,k,v}_proj`, `self_attn.dense`, `mlp.fc1`, `mlp.fc2`, all with biases;
    with qk_layernorm also `self_attn.{q,k}_layernorm`.
    """

    def __init__(self, name, config: PhiConfig, rope: Rope):
        super().__init__(name)
        self.input_norm = LayerNorm(f"{name}.input_layernorm", config.hidden_size, config.norm_eps)
        self.attention = Attention(
            f"{name}.self_attn", config.hidden_size, config.num_heads, config.num_kv_heads, out="dense", rope=rope,
            qk_norm_eps=config.norm_eps if config.use_qk_norm else None,
            qk_norm=LayerNorm, qk_norm_names=("q_layernorm", "k_layernorm"),
        )  # fmt: skip
        self.mlp = MLP(f"{name}.mlp", config.hidden_size, config.intermediate_size, config.activation, up="fc1", down="fc2")

    def forward(self, x, tokens):
        """x: [B, T, D], tokens: DecoderTokens -> [B, T, D]."""
        normed = self.input_norm(x)
        return x + (self.attention(normed, tokens) + self.mlp(normed))


class Phi(DecoderModel):
    """A Phi with its language-model head, which has a bias."""

    config_class = PhiConfig
    ignored_keys = (r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)  # a buffer that older versions saved

    def __init__(self, config: PhiConfig):
        super().__init__("model", config)
        rope = config.rope.rope(config.hidden_size // config.num_heads, REGISTER.max_length)
        self.token_embedding = Embedding("model.embed_tokens", config.vocab_size, config.hidden_size, "vocab", config.is_tied)
        self.blocks = [PhiBlock(f"model.layers.{i}", config, rope) for i in range(config.num_layers)]
        self.final_norm = LayerNorm("model.final_layernorm", config.hidden_size, config.norm_eps)
        tied = self.token_embedding.weight if config.is_tied else None
        self.lm_head = LMHead("lm_head", config.hidden_size, config.vocab_size, tied, bias=True)
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
            "q_proj.weight": "(hidden_size, hidden_size)",
            "k_proj.weight": "(num_key_value_heads * hidden_size // num_attention_heads, hidden_size)",
            "v_proj.weight": "(num_key_value_heads * hidden_size // num_attention_heads, hidden_size)",
            "fc1.weight": "(intermediate_size, hidden_size)",
            "fc2.weight": "(hidden_size, intermediate_size)",
        }.get(".".join(parameter_name.split(".")[-2:]), "")

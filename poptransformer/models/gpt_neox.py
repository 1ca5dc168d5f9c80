"""GPT-NeoX: Pythia, GPT-NeoX-20B and their kin. Attention and MLP side by side, rotary positions on part of each head.

Source: Black et al. 2022, arXiv:2204.06745; Biderman et al. 2023, arXiv:2304.01373; HF modeling_gpt_neox.py.
"""

from __future__ import annotations

import dataclasses

from poptransformer.layers import MLP, Attention, BaseLayer, Embedding, LayerNorm, LMHead, Rope
from poptransformer.models.config import ConfigReader
from poptransformer.models.decoder_model import DecoderModel
from poptransformer.models.fused_qkv import part_by_part
from poptransformer.models.rope_scaling import RopeScaling
from poptransformer.register import REGISTER

# Names of their own for what RopeScaling reads; where a file has both, these count.
ROPE_KEYS = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}


@dataclasses.dataclass(frozen=True)
class GPTNeoXConfig:
    """Sizes and switches of a GPT-NeoX, with their keys in the Hugging Face config where those differ."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int  # num_hidden_layers
    num_heads: int  # num_attention_heads
    max_seq_len: int  # max_position_embeddings
    activation: str  # hidden_act
    norm_eps: float  # layer_norm_eps
    is_tied: bool  # tie_word_embeddings
    attention_bias: bool
    is_parallel: bool  # use_parallel_residual
    rope: RopeScaling  # rotary_emb_base and rotary_pct with rope_scaling, or rope_parameters

    @property
    def why_not_longer(self) -> str:
        """Why rows end at max_seq_len, where the config reads as if they could go on."""
        return self.rope.why_not_longer

    @classmethod
    def from_hf(cls, config: dict) -> GPTNeoXConfig:
        """Read a config.json. Raises: UserError naming all keys that are missing or wrong; UnsupportedError."""
        rope_keys = {name: config[key] for key, name in ROPE_KEYS.items() if config.get(key) is not None}
        with ConfigReader(config) as read:
            hidden_size, num_heads = read.size("hidden_size"), read.size("num_attention_heads")
            read.check_multiple("hidden_size", hidden_size, "num_attention_heads", num_heads)
            max_seq_len = read.size("max_position_embeddings", default=2048)
            return cls(
                vocab_size=read.size("vocab_size"),
                hidden_size=hidden_size,
                intermediate_size=read.size("intermediate_size"),
                num_layers=read.num_layers("num_hidden_layers"),
                num_heads=num_heads,
                max_seq_len=max_seq_len,
                activation=config.get("hidden_act", "gelu"),
                norm_eps=read.number("layer_norm_eps", 1e-5),
                is_tied=read.switch("tie_word_embeddings", False),
                attention_bias=read.switch("attention_bias", True),
                is_parallel=read.switch("use_parallel_residual", True),
                rope=RopeScaling.from_hf(config | rope_keys, max_seq_len, default_share=0.25),
            )


class GPTNeoXBlock(BaseLayer):
    """One block: attention and MLP, each on a norm of its own, one after the other or (is_parallel) side by side.

    Checkpoint keys: `input_layernorm`, `attention.query_key_value` (rows head by head), `attention.dense`,
    `post_attention_layernorm`, `mlp.dense_h_to_4h`, `mlp.dense_4h_to_h`.
    """

    def __init__(self, name, config: GPTNeoXConfig, rope: Rope):
        super().__init__(name)
        self.is_parallel = config.is_parallel
        self.input_norm = LayerNorm(f"{name}.input_layernorm", config.hidden_size, config.norm_eps)
        self.attention = Attention(
            f"{name}.attention", config.hidden_size, config.num_heads, qkv=("query_key_value",), out="dense",
            bias=config.attention_bias, rope=rope,
        )  # fmt: skip
        self.post_attention_norm = LayerNorm(f"{name}.post_attention_layernorm", config.hidden_size, config.norm_eps)
        self.mlp = MLP(
            f"{name}.mlp", config.hidden_size, config.intermediate_size, config.activation,
            up="dense_h_to_4h", down="dense_4h_to_h",
        )  # fmt: skip

    def forward(self, x, tokens):
        """x: [B, T, D], tokens: DecoderTokens -> [B, T, D]."""
        attended = self.attention(self.input_norm(x), tokens)
        if self.is_parallel:
            return x + (attended + self.mlp(self.post_attention_norm(x)))
        x = x + attended
        return x + self.mlp(self.post_attention_norm(x))


class GPTNeoX(DecoderModel):
    """A GPT-NeoX with its language-model head."""

    config_class = GPTNeoXConfig
    # Causal masks and frequencies that older versions of the original code saved as buffers.
    ignored_keys = (r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",)

    def __init__(self, config: GPTNeoXConfig):
        super().__init__("gpt_neox", config)
        rope = config.rope.rope(config.hidden_size // config.num_heads, REGISTER.max_length)
        self.token_embedding = Embedding("gpt_neox.embed_in", config.vocab_size, config.hidden_size, "vocab", config.is_tied)
        self.blocks = [GPTNeoXBlock(f"gpt_neox.layers.{i}", config, rope) for i in range(config.num_layers)]
        self.final_norm = LayerNorm("gpt_neox.final_layer_norm", config.hidden_size, config.norm_eps)
        tied = self.token_embedding.weight if config.is_tied else None
        self.lm_head = LMHead("embed_out", config.hidden_size, config.vocab_size, tied)
        if config.is_tied:
            self.ignored_keys += (r"(embed_out|lm_head)\.weight",)  # some checkpoints hold the tied weight twice

    def forward(self, ids, tokens):
        x = self.token_embedding(ids)
        for block in self.blocks:
            x = block(x, tokens)
        return self.final_norm(x)

    def head(self, hidden):
        return self.lm_head(hidden)

    # ---- checkpoint

    def checkpoint_keys(self, parameter_name):
        if parameter_name == "embed_out.weight":
            return (parameter_name, "lm_head.weight")  # the latter since transformers 5
        return (parameter_name, parameter_name.removeprefix("gpt_neox."))

    def row_order(self, parameter_name):
        if ".query_key_value." in parameter_name:
            return part_by_part(3 * self.config.hidden_size, self.config.num_heads)
        return None

    def shape_meaning(self, parameter_name):
        return {
            "embed_in.weight": "(vocab_size, hidden_size)",
            "embed_out.weight": "(vocab_size, hidden_size)",
            "query_key_value.weight": "(3 * hidden_size, hidden_size)",
            "dense_h_to_4h.weight": "(intermediate_size, hidden_size)",
            "dense_4h_to_h.weight": "(hidden_size, intermediate_size)",
        }.get(".".join(parameter_name.split(".")[-2:]), "")

"""ChatGLM2-6B, ChatGLM3-6B and GLM-4 in their original form: multi-query attention, half of each head turning, a gated MLP.

Source: Zeng et al. 2023, arXiv:2210.02414; GLM team 2024, arXiv:2406.12793; modeling_chatglm.py of THUDM/chatglm2-6b and
THUDM/chatglm3-6b.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from poptransformer.errors import UnsupportedError
from poptransformer.layers import Attention, BaseLayer, Embedding, GatedMLP, LayerNorm, LMHead, RMSNorm, Rope
from poptransformer.models.chatglm import refuse_variants
from poptransformer.models.config import ConfigReader
from poptransformer.models.decoder_model import DecoderModel
from poptransformer.models.fused_qkv import part_by_part


@dataclasses.dataclass(frozen=True)
class ChatGLM2Config:
    """Sizes and switches, with their keys in the checkpoint's config where those differ."""

    vocab_size: int  # padded_vocab_size
    hidden_size: int
    intermediate_size: int  # ffn_hidden_size
    num_layers: int
    num_heads: int  # num_attention_heads
    num_kv_heads: int  # multi_query_group_num with multi_query_attention, else num_attention_heads
    head_dim: int  # kv_channels
    max_seq_len: int  # seq_length
    norm_eps: float  # layernorm_epsilon
    use_rms_norm: bool  # rmsnorm
    use_final_norm: bool  # post_layer_norm
    has_normed_residual: bool  # apply_residual_connection_post_layernorm
    qkv_bias: bool  # add_qkv_bias or add_bias_linear
    bias: bool  # add_bias_linear
    is_multi_query: bool  # multi_query_attention
    rope_theta: float  # 10000 * rope_ratio

    @classmethod
    def from_hf(cls, config: dict) -> ChatGLM2Config:
        """Read a config.json.

        Raises: UserError naming all keys that are missing or wrong; UnsupportedError for prefix tuning, packed weights and
          ChatGLM2-6B-32K.
        """
        refuse_variants(config)
        with ConfigReader(config) as read:
            rope_ratio = read.number("rope_ratio", 1)
            if rope_ratio != 1 and "chatglm2" in str(config.get("_name_or_path", "")).lower():
                raise UnsupportedError(
                    f"config.json: rope_ratio={rope_ratio!r} of a ChatGLM2 (32K) is not supported: it divides positions, where "
                    "that of ChatGLM3 and later multiplies the base"
                )
            if rope_ratio <= 0:
                read.problem("rope_ratio=0: wanted a number above 0")
            num_heads, head_dim = read.size("num_attention_heads"), read.size("kv_channels")
            read.check_multiple("kv_channels", head_dim, "4 (a half turns, in pairs)", 4)
            is_multi_query = read.switch("multi_query_attention", False)
            num_kv_heads = read.size("multi_query_group_num") if is_multi_query else num_heads
            read.check_multiple("num_attention_heads", num_heads, "multi_query_group_num", num_kv_heads)
            bias = read.switch("add_bias_linear", False)
            return cls(
                vocab_size=read.size("padded_vocab_size"),
                hidden_size=read.size("hidden_size"),
                intermediate_size=read.size("ffn_hidden_size"),
                num_layers=read.num_layers("num_layers"),
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                max_seq_len=read.size("seq_length"),
                norm_eps=read.number("layernorm_epsilon", 1e-5),
                use_rms_norm=read.switch("rmsnorm", True),
                use_final_norm=read.switch("post_layer_norm", True),
                has_normed_residual=read.switch("apply_residual_connection_post_layernorm", False),
                qkv_bias=read.switch("add_qkv_bias", False) or bias,
                bias=bias,
                is_multi_query=is_multi_query,
                rope_theta=10000.0 * rope_ratio,
            )


def make_norm(name, config: ChatGLM2Config):
    """The norm that the config names."""
    return (RMSNorm if config.use_rms_norm else LayerNorm)(name, config.hidden_size, config.norm_eps)


class ChatGLM2Block(BaseLayer):
    """One block: attention, then MLP, each on the normed input.

    Checkpoint keys: `input_layernorm`, `self_attention.query_key_value`, `self_attention.dense`, `post_attention_layernorm`,
    `mlp.dense_h_to_4h` (gate rows, then up rows), `mlp.dense_4h_to_h`.
    """

    def __init__(self, name, config: ChatGLM2Config, rope: Rope):
        super().__init__(name)
        self.has_normed_residual = config.has_normed_residual
        self.input_norm = make_norm(f"{name}.input_layernorm", config)
        self.attention = Attention(
            f"{name}.self_attention", config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim,
            qkv=("query_key_value",), out="dense", bias=config.qkv_bias, out_bias=config.bias, rope=rope,
        )  # fmt: skip
        self.post_attention_norm = make_norm(f"{name}.post_attention_layernorm", config)
        self.mlp = GatedMLP(
            f"{name}.mlp", config.hidden_size, config.intermediate_size, "silu",
            gate_up="dense_h_to_4h", down="dense_4h_to_h", bias=config.bias,
        )  # fmt: skip

    def forward(self, x, tokens):
        """x: [B, T, D], tokens: DecoderTokens -> [B, T, D]."""
        normed = self.input_norm(x)
        x = (normed if self.has_normed_residual else x) + self.attention(normed, tokens)
        normed = self.post_attention_norm(x)
        return (normed if self.has_normed_residual else x) + self.mlp(normed)


class ChatGLM2(DecoderModel):
    """A model of the second generation or later with its language-model head, which is not tied."""

    config_class = ChatGLM2Config
    ignored_keys = (r"transformer\.rotary_pos_emb\.inv_freq",)  # frequencies that the original saves as a buffer

    def __init__(self, config: ChatGLM2Config):
        super().__init__("transformer", config)
        turning = config.head_dim // 2
        exponents = np.arange(0, turning, 2, dtype=np.float32) / np.float32(turning)
        rope = Rope(np.float32(1) / np.float32(config.rope_theta) ** exponents, interleaved=True)
        embedding = "transformer.embedding.word_embeddings"
        self.token_embedding = Embedding(embedding, config.vocab_size, config.hidden_size, shard="vocab")
        self.blocks = [ChatGLM2Block(f"transformer.encoder.layers.{i}", config, rope) for i in range(config.num_layers)]
        self.final_norm = make_norm("transformer.encoder.final_layernorm", config) if config.use_final_norm else None
        self.lm_head = LMHead("transformer.output_layer", config.hidden_size, config.vocab_size)

    def forward(self, ids, tokens):
        x = self.token_embedding(ids)
        for block in self.blocks:
            x = block(x, tokens)
        return self.final_norm(x) if self.final_norm else x

    def head(self, hidden):
        return self.lm_head(hidden)

    # ---- checkpoint

    def row_order(self, parameter_name):
        if ".query_key_value." in parameter_name and not self.config.is_multi_query:
            return part_by_part(3 * self.config.num_heads * self.config.head_dim, self.config.num_heads)
        return None

    def shape_meaning(self, parameter_name):
        return {
            "word_embeddings.weight": "(padded_vocab_size, hidden_size)",
            "output_layer.weight": "(padded_vocab_size, hidden_size)",
            "query_key_value.weight": "((num_attention_heads + 2 * multi_query_group_num) * kv_channels, hidden_size)",
            "dense_h_to_4h.weight": "(2 * ffn_hidden_size, hidden_size)",
            "dense_4h_to_h.weight": "(hidden_size, ffn_hidden_size)",
        }.get(".".join(parameter_name.split(".")[-2:]), "")

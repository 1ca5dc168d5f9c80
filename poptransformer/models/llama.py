"""Llama 1 to 3 and its kin: Mistral, Qwen2, Qwen3. RMSNorm, rotary positions, grouped queries, a gated MLP.

Source: Touvron et al. 2023, arXiv:2302.13971; HF modeling_llama.py, modeling_mistral.py, modeling_qwen2.py, modeling_qwen3.py.
"""

from __future__ import annotations

import dataclasses

from poptransformer.errors import UnsupportedError, UserError
from poptransformer.layers import Attention, BaseLayer, Embedding, GatedMLP, LMHead, RMSNorm, Rope
from poptransformer.models.config import read_bool, read_config, read_number
from poptransformer.models.decoder_model import DecoderModel
from poptransformer.models.rope_scaling import RopeScaling
from poptransformer.register import REGISTER

# model_type -> what transformers takes for a key that config.json lacks.
DEFAULTS = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {
        "max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28,
        "head_dim": 128,
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes and switches of the family, with their keys in the Hugging Face config where those differ."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int  # num_hidden_layers
    num_heads: int  # num_attention_heads
    max_seq_len: int  # max_position_embeddings
    num_kv_heads: int  # num_key_value_heads; None there means num_attention_heads
    head_dim: int  # None there means hidden_size // num_attention_heads
    activation: str  # hidden_act
    norm_eps: float  # rms_norm_eps
    is_tied: bool  # tie_word_embeddings
    qkv_bias: bool  # attention_bias; Qwen2 always has it
    out_bias: bool  # attention_bias; Qwen2 never has it
    mlp_bias: bool
    use_qk_norm: bool  # Qwen3
    windows: tuple[int | None, ...]  # tokens that each layer sees (sliding_window), None for the whole row
    rope: RopeScaling  # rope_theta with rope_scaling, or rope_parameters

    @property
    def why_not_longer(self) -> str:
        """Why rows end at max_seq_len, where the config reads as if they could go on."""
        return self.rope.why_not_longer

    @classmethod
    def from_hf(cls, config: dict) -> LlamaConfig:
        """Read a config.json.

        Raises: UserError naming keys that are missing or wrong; UnsupportedError for what these models do not do.
        """
        family = config["model_type"]
        config = DEFAULTS[family] | config
        if config.get("pretraining_tp", 1) not in (1, None):
            raise UnsupportedError(
                f"config.json: pretraining_tp={config['pretraining_tp']!r} is not supported: it only changes how products are "
                "rounded; set 1"
            )
        optional = {"num_kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
        sizes = read_config(
            config, vocab_size="vocab_size", hidden_size="hidden_size", intermediate_size="intermediate_size",
            num_layers="num_hidden_layers", num_heads="num_attention_heads", max_seq_len="max_position_embeddings",
            **{name: key for name, key in optional.items() if config.get(key) is not None},
        )  # fmt: skip
        if "head_dim" not in sizes and sizes["hidden_size"] % sizes["num_heads"]:
            raise UserError(
                f"config.json: hidden_size={sizes['hidden_size']} is not a multiple of num_attention_heads="
                f"{sizes['num_heads']}; is head_dim missing?"
            )
        attention_bias = family in ("llama", "qwen3") and read_bool(config, "attention_bias", False)
        return cls(
            **{"num_kv_heads": sizes["num_heads"], "head_dim": sizes["hidden_size"] // sizes["num_heads"]} | sizes,
            activation=config.get("hidden_act", "silu"),
            norm_eps=read_number(config, "rms_norm_eps", 1e-6),
            is_tied=read_bool(config, "tie_word_embeddings", False),
            qkv_bias=attention_bias or family == "qwen2",
            out_bias=attention_bias,
            mlp_bias=family == "llama" and read_bool(config, "mlp_bias", False),
            use_qk_norm=family == "qwen3",
            windows=_windows(config, sizes["num_layers"]),
            rope=RopeScaling.from_hf(config, sizes["max_seq_len"]),
        )


def _windows(config, num_layers):
    """The window of each layer, None for the whole row.

    layer_types says which layers have one; where it is missing all of Mistral's do, and Qwen's from max_window_layers on.
    """
    family = config["model_type"]
    use_windows = family == "mistral" or family in ("qwen2", "qwen3") and read_bool(config, "use_sliding_window", False)
    has_window = use_windows and config["sliding_window"] is not None
    window = read_config(config, window="sliding_window")["window"] if has_window else None
    kinds = config.get("layer_types")
    if family == "llama" or kinds is None:
        first = _max_window_layers(config) if use_windows and family != "mistral" else 0
        return tuple(window if i >= first else None for i in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise UserError(f"config.json: layer_types={kinds!r}: wanted a list with one kind for each of {num_layers} layers")
    others = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if others:
        raise UnsupportedError(
            f"config.json: layer_types has {others[0]!r}, which is not supported; there are full_attention, sliding_attention"
        )
    if "sliding_attention" in kinds and not has_window:
        why = "sliding_window is null" if use_windows else "use_sliding_window is not true"
        raise UserError(f"config.json: layer_types has sliding_attention, but {why}; change one of them")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _max_window_layers(config):
    first = config["max_window_layers"]
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise UserError(f"config.json: max_window_layers={first!r}: wanted a whole number of at least 0")
    return first


class LlamaBlock(BaseLayer):
    """One block: attention, then MLP, each on the normed input and added to it.

    Checkpoint keys: `input_layernorm`, `self_attn.{q,k,v,o}_proj`, Qwen3 also `self_attn.{q,k}_norm`,
    `post_attention_layernorm`, `mlp.{gate,up,down}_proj`.
    """

    def __init__(self, name, config: LlamaConfig, rope: Rope, window: int | None):
        super().__init__(name)
        self.input_norm = RMSNorm(f"{name}.input_layernorm", config.hidden_size, config.norm_eps)
        self.attention = Attention(
            f"{name}.self_attn", config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim,
            bias=config.qkv_bias, out_bias=config.out_bias, rope=rope,
            qk_norm_eps=config.norm_eps if config.use_qk_norm else None, window=window,
        )  # fmt: skip
        self.post_attention_norm = RMSNorm(f"{name}.post_attention_layernorm", config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(
            f"{name}.mlp", config.hidden_size, config.intermediate_size, config.activation, bias=config.mlp_bias
        )

    def forward(self, x, tokens):
        """x: [B, T, D], tokens: DecoderTokens -> [B, T, D]."""
        x = x + self.attention(self.input_norm(x), tokens)
        return x + self.mlp(self.post_attention_norm(x))


class Llama(DecoderModel):
    """A model of the family with its language-model head."""

    config_class = LlamaConfig
    # Frequencies that older versions of the original code saved as buffers.
    ignored_keys = (r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)

    def __init__(self, config: LlamaConfig):
        super().__init__("model", config)
        rope = config.rope.rope(config.head_dim, REGISTER.max_length)
        self.token_embedding = Embedding("model.embed_tokens", config.vocab_size, config.hidden_size, "vocab", config.is_tied)
        self.blocks = [LlamaBlock(f"model.layers.{i}", config, rope, window) for i, window in enumerate(config.windows)]
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
            "embed_tokens": "(vocab_size, hidden_size)",
            "lm_head": "(vocab_size, hidden_size)",
            "q_proj": "(num_attention_heads * head_dim, hidden_size)",
            "k_proj": "(num_key_value_heads * head_dim, hidden_size)",
            "v_proj": "(num_key_value_heads * head_dim, hidden_size)",
            "o_proj": "(hidden_size, num_attention_heads * head_dim)",
            "gate_proj": "(intermediate_size, hidden_size)",
            "up_proj": "(intermediate_size, hidden_size)",
            "down_proj": "(hidden_size, intermediate_size)",
        }.get(parameter_name.removesuffix(".weight").rpartition(".")[2] if parameter_name.endswith(".weight") else "", "")

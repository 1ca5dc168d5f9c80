"""ChatGLM-6B, the first generation: two kinds of position, a context that sees itself whole, residuals of the normed input.

A row is a context, then <sop> and what is generated. The context has a blank, [gMASK] or [MASK], which the generated text
fills: its tokens all stand at the blank's position and count 1, 2, ... by themselves (the block position, 0 in the context).

Source: Du et al. 2022, arXiv:2103.10360; Zeng et al. 2023, arXiv:2210.02414; modeling_chatglm.py of THUDM/chatglm-6b.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from poptransformer import ops
from poptransformer.errors import UnsupportedError, UserError
from poptransformer.layers import MLP, Attention, BaseLayer, Embedding, LayerNorm, LMHead
from poptransformer.models.config import ConfigReader
from poptransformer.models.decoder_model import DecoderModel
from poptransformer.models.fused_qkv import part_by_part

# The original builds every block as one of 28, whatever num_layers says.
RESIDUAL_SCALE = math.sqrt(2 * 28)
# The first release (before v1.1) has its blanks' ids in its code, and none in its config.
FIRST_VOCAB_SIZE, FIRST_MASK, FIRST_GMASK = 150528, 150000, 150001
COUNTS_ON = -1  # mask_position of a row whose generated tokens have positions of their own


@dataclasses.dataclass(frozen=True)
class ChatGLMConfig:
    """Sizes and special tokens of a ChatGLM-6B, with their keys in its config where those differ."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # inner_hidden_size; None there means 4 * hidden_size
    num_layers: int
    num_heads: int  # num_attention_heads
    max_seq_len: int  # max_sequence_length
    norm_eps: float  # layernorm_epsilon
    use_block_positions: bool  # position_encoding_2d
    is_tied: bool  # tie_word_embeddings
    sop_token_id: int  # bos_token_id
    mask_token_id: int
    gmask_token_id: int

    @classmethod
    def from_hf(cls, config: dict) -> ChatGLMConfig:
        """Read a config.json.

        Raises: UserError naming all keys that are missing or wrong; UnsupportedError for prefix tuning and packed weights.
        """
        refuse_variants(config)
        with ConfigReader(config) as read:
            hidden_size, num_heads = read.size("hidden_size"), read.size("num_attention_heads")
            use_block_positions = read.switch("position_encoding_2d", True)
            parts = 4 if use_block_positions else 2
            read.check_multiple("hidden_size", hidden_size, f"{parts} * num_attention_heads", parts * num_heads)
            vocab_size = read.size("vocab_size")
            is_first = vocab_size == FIRST_VOCAB_SIZE
            return cls(
                vocab_size=vocab_size,
                hidden_size=hidden_size,
                intermediate_size=read.size("inner_hidden_size", default=4 * hidden_size),
                num_layers=read.num_layers("num_layers"),
                num_heads=num_heads,
                max_seq_len=read.size("max_sequence_length"),
                norm_eps=read.number("layernorm_epsilon", 1e-5),
                use_block_positions=use_block_positions,
                is_tied=read.switch("tie_word_embeddings", True),
                sop_token_id=read.token_id("bos_token_id", vocab_size),
                mask_token_id=read.token_id("mask_token_id", vocab_size, FIRST_MASK if is_first else None),
                gmask_token_id=read.token_id("gmask_token_id", vocab_size, FIRST_GMASK if is_first else None),
            )


def refuse_variants(config: dict) -> None:
    """Refuse what checkpoints of any ChatGLM may be but plain ones are not. Raises: UnsupportedError naming the keys."""
    found = []
    if config.get("pre_seq_len") is not None:
        found.append(f"pre_seq_len={config['pre_seq_len']!r} (tuned prefixes in front of the keys and values)")
    if config.get("quantization_bit"):
        found.append(f"quantization_bit={config['quantization_bit']!r} (packed weights)")
    if found:
        raise UnsupportedError(f"config.json: {' and '.join(found)} is not supported; use the plain checkpoint")


@dataclasses.dataclass(frozen=True, eq=False)
class TwoPositionsRope:
    """Rotary positions of both kinds: a head's first half turns by the position, its second by the block position.

    Attributes:
      inv_freq: [head_dim / 4] float32, radians a position, for either half.
    """

    inv_freq: np.ndarray

    def __call__(self, query, key, tokens):
        """query: [B, T, N, H], key: [B, T, K, H], tokens: DecoderTokens with both positions in `row` -> both turned."""
        return self._turn(query, tokens), self._turn(key, tokens)

    def _turn(self, x, tokens):
        inv_freq = x.graph.constant(self.inv_freq)
        first, second = ops.split(x, [x.shape[-1] // 2] * 2)
        first = ops.rope(first, tokens.row["position_ids"], inv_freq)
        return ops.concat([first, ops.rope(second, tokens.row["block_position_ids"], inv_freq)])


@dataclasses.dataclass(frozen=True, eq=False)
class OnePositionRope:
    """Rotary positions of the first kind alone, for whole heads (position_encoding_2d: false)."""

    inv_freq: np.ndarray

    def __call__(self, query, key, tokens):
        """As TwoPositionsRope."""
        inv_freq = query.graph.constant(self.inv_freq)
        return [ops.rope(x, tokens.row["position_ids"], inv_freq) for x in (query, key)]


def make_rope(config: ChatGLMConfig):
    """The rope of a model. Frequencies are rounded to float16, as the original does in every precision."""
    head_dim = config.hidden_size // config.num_heads
    turning = head_dim // 2 if config.use_block_positions else head_dim
    exponents = np.arange(0, turning, 2, dtype=np.float32) / np.float32(turning)
    inv_freq = (np.float32(1) / np.float32(10000) ** exponents).astype(np.float16).astype(np.float32)
    return (TwoPositionsRope if config.use_block_positions else OnePositionRope)(inv_freq)


class ChatGLMBlock(BaseLayer):
    """One block: attention, then MLP, each added to a multiple of its own normed input.

    Checkpoint keys: `input_layernorm`, `attention.query_key_value` (rows head by head), `attention.dense`,
    `post_attention_layernorm`, `mlp.dense_h_to_4h`, `mlp.dense_4h_to_h`, all with biases.
    """

    def __init__(self, name, config: ChatGLMConfig, rope):
        super().__init__(name)
        self.input_norm = LayerNorm(f"{name}.input_layernorm", config.hidden_size, config.norm_eps)
        self.attention = Attention(
            f"{name}.attention", config.hidden_size, config.num_heads, qkv=("query_key_value",), out="dense", rope=rope,
            use_prefix=True,
        )  # fmt: skip
        self.post_attention_norm = LayerNorm(f"{name}.post_attention_layernorm", config.hidden_size, config.norm_eps)
        self.mlp = MLP(
            f"{name}.mlp", config.hidden_size, config.intermediate_size, "gelu_new", up="dense_h_to_4h", down="dense_4h_to_h"
        )

    def forward(self, x, tokens):
        """x: [B, T, D], tokens: DecoderTokens -> [B, T, D]."""
        normed = self.input_norm(x)
        x = normed * RESIDUAL_SCALE + self.attention(normed, tokens)
        normed = self.post_attention_norm(x)
        return normed * RESIDUAL_SCALE + self.mlp(normed)


class ChatGLM(DecoderModel):
    """A ChatGLM-6B with its language-model head.

    Row inputs: context_len, the tokens before <sop>; mask_position, where the blank is.
    """

    config_class = ChatGLMConfig
    row_inputs = ("context_len", "mask_position")
    needs_whole_prompt = True  # the first token of the context sees the last one
    # Frequencies that the original saves as buffers.
    ignored_keys = (r"transformer\.layers\.\d+\.attention\.rotary_emb\.inv_freq",)

    def __init__(self, config: ChatGLMConfig):
        super().__init__("transformer", config)
        rope = make_rope(config)
        self.token_embedding = Embedding(
            "transformer.word_embeddings", config.vocab_size, config.hidden_size, "vocab", is_tied=True
        )
        self.blocks = [ChatGLMBlock(f"transformer.layers.{i}", config, rope) for i in range(config.num_layers)]
        self.final_norm = LayerNorm("transformer.final_layernorm", config.hidden_size, config.norm_eps)
        tied = self.token_embedding.weight if config.is_tied else None
        self.lm_head = LMHead("lm_head", config.hidden_size, config.vocab_size, tied)
        if config.is_tied:
            self.ignored_keys += (r"lm_head\.weight",)  # most checkpoints hold the tied weight twice

    def describe_row(self, ids):
        config = self.config
        is_gmask = config.gmask_token_id in ids
        lacks, todo = [], f"append {config.gmask_token_id}, {config.sop_token_id}"
        if not is_gmask and config.mask_token_id not in ids:
            lacks.append(f"a blank, [gMASK] ({config.gmask_token_id}) or [MASK] ({config.mask_token_id})")
            if config.sop_token_id in ids:
                todo = f"put {config.gmask_token_id} before {config.sop_token_id}"
        elif config.sop_token_id not in ids:
            todo = f"append {config.sop_token_id}"
        if config.sop_token_id not in ids:
            lacks.append(f"<sop> ({config.sop_token_id}), where the blank's filling begins")
        if lacks:
            raise UserError(f"token ids for ChatGLM-6B lack {' and '.join(lacks)}; {todo} to have the text continued")
        mask_position = ids.index(config.gmask_token_id if is_gmask else config.mask_token_id)
        counts_on = is_gmask and not config.use_block_positions
        return {"context_len": ids.index(config.sop_token_id), "mask_position": COUNTS_ON if counts_on else mask_position}

    def forward(self, ids, tokens):
        tokens = dataclasses.replace(tokens, row=tokens.row | self._positions(tokens))
        x = self.token_embedding(ids)
        for block in self.blocks:
            x = block(x, tokens)
        return self.final_norm(x)

    def _positions(self, tokens):
        """position_ids and block_position_ids of the tokens, [B, T] int32 each."""
        index = tokens.position_ids
        context_len, mask_position = (ops.reshape(tokens.row[name], (self.batch_size, 1)) for name in self.row_inputs)
        is_filling = ops.logical_and(index >= context_len, mask_position >= 0)
        at_mask = ops.broadcast_to(mask_position, index.shape)
        return {
            "position_ids": ops.select(is_filling, at_mask, index),
            "block_position_ids": ops.maximum(index - context_len + 1, 0),
        }

    def head(self, hidden):
        return self.lm_head(hidden)

    # ---- checkpoint

    def row_order(self, parameter_name):
        if ".query_key_value." in parameter_name:
            return part_by_part(3 * self.config.hidden_size, self.config.num_heads)
        return None

    def shape_meaning(self, parameter_name):
        return {
            "word_embeddings.weight": "(vocab_size, hidden_size)",
            "lm_head.weight": "(vocab_size, hidden_size)",
            "query_key_value.weight": "(3 * hidden_size, hidden_size)",
            "dense_h_to_4h.weight": "(inner_hidden_size, hidden_size)",
            "dense_4h_to_h.weight": "(hidden_size, inner_hidden_size)",
        }.get(".".join(parameter_name.split(".")[-2:]), "")

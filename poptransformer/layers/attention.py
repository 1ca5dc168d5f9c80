"""Attention: query, key and value projections, attention over the KV cache, output projection."""

from __future__ import annotations

import math

import numpy as np

from poptransformer import ops
from poptransformer.errors import UserError
from poptransformer.graph import State
from poptransformer.kv_cache import row_width
from poptransformer.layers.base_layer import BaseLayer
from poptransformer.layers.linear import Linear
from poptransformer.layers.rms_norm import RMSNorm
from poptransformer.parallel import cut_heads, joined_cut
from poptransformer.register import REGISTER


class Attention(BaseLayer):
    """Multi-head or grouped-query self-attention with a KV cache of its own.

    Checkpoint keys: those of its Linear layers; a fused projection holds query, key and value rows one after the other:
    `[(N + 2 * K) * H, D]`. With qk_norm_eps also those of the norms, `q_norm` and `k_norm` unless named otherwise.

    Args:
      hidden_size: D.
      num_heads, num_kv_heads: N and K; N is a multiple of K.
      head_dim: H; None takes hidden_size // num_heads.
      scale: factor on the scores; None takes 1 / sqrt(H).
      qkv: names of the input projections in the checkpoint: one (fused) or three.
      out: name of the output projection.
      bias: whether the input projections have one.
      out_bias: whether the output projection has one; None: as the input projections.
      rope: Rope that turns queries and keys, or None for a model with positions elsewhere.
      qk_norm_eps: None, or the eps of a norm over each head of the queries and keys, before they turn.
      qk_norm, qk_norm_names: that norm's layer, and its names in the checkpoint.
      window: tokens that each one sees, itself included; None for the whole row.
      alibi_slopes: [N], factor on the distance that is added to each head's scores, or None.
      use_prefix: whether the first tokens.row["context_len"] tokens of a row are visible to all of it.
    """

    def __init__(
        self, name, hidden_size, num_heads, num_kv_heads=None, head_dim=None, scale=None,
        qkv=("q_proj", "k_proj", "v_proj"), out="o_proj", bias=True, out_bias=None,
        rope=None, qk_norm_eps=None, qk_norm=RMSNorm, qk_norm_names=("q_norm", "k_norm"),
        window=None, alibi_slopes=None, use_prefix=False,
    ):  # fmt: skip
        super().__init__(name)
        num_kv_heads = num_kv_heads or num_heads
        if head_dim is None and hidden_size % num_heads:
            raise UserError(
                f"{name}: hidden_size={hidden_size} is not a multiple of num_heads={num_heads}; is one of them wrong?"
            )
        if num_heads % num_kv_heads:
            raise UserError(f"{name}: num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}")
        self.head_dim = head_dim or hidden_size // num_heads
        self.scale = 1 / math.sqrt(self.head_dim) if scale is None else scale
        counts = (num_heads, num_kv_heads, num_kv_heads)
        heads = cut_heads(num_heads, num_kv_heads, self.world_size)
        self.num_heads, self.num_kv_heads = heads.num_heads, heads.num_kv_heads  # those of one rank
        self.qkv_sizes = [count * self.head_dim for count in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        sizes = [count * self.head_dim for count in counts]
        pieces = [[piece.scaled(self.head_dim) for piece in part] for part in (heads.query, heads.kv, heads.kv)]
        if len(qkv) == 1:
            sizes, cuts = [sum(sizes)], [joined_cut(0, sizes, pieces)]
        else:
            cuts = [joined_cut(0, [size], [part]) for size, part in zip(sizes, pieces, strict=True)]
        is_cut = self.world_size > 1
        self.qkv = [
            Linear(f"{name}.{key}", hidden_size, size, bias, "column", cut if is_cut else None)
            for key, size, cut in zip(qkv, sizes, cuts, strict=True)
        ]
        out_bias = bias if out_bias is None else out_bias
        width = num_heads * self.head_dim
        out_cut = joined_cut(1, [width], [pieces[0]]) if is_cut else None
        self.out = Linear(f"{name}.{out}", width, hidden_size, out_bias, "row", out_cut)
        self.head_mask = None
        if num_kv_heads < self.world_size and any(piece.stop - piece.begin < piece.size for piece in heads.query):
            # Heads that fill up read real keys; packed columns of the output projection may be not quite zero for them.
            cut = joined_cut(0, [num_heads], [heads.query])
            masks = [np.repeat(cut.indices(rank) >= 0, self.head_dim) for rank in range(self.world_size)]
            self.head_mask = np.stack(masks).astype(self.dtype)
        self.rope = rope
        self.window, self.use_prefix = window, use_prefix
        self.alibi_slopes = None
        if alibi_slopes is not None:
            cut = joined_cut(0, [num_heads], [heads.query])
            self.alibi_slopes = np.stack([cut.take(np.float32(alibi_slopes), rank) for rank in range(self.world_size)])
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:
            self.q_norm, self.k_norm = (qk_norm(f"{name}.{key}", self.head_dim, qk_norm_eps) for key in qk_norm_names)
        width = row_width(self.head_dim, REGISTER.cache_dtype)
        cache_shape = (REGISTER.batch_size, self.num_kv_heads, REGISTER.max_length, width)  # [B, K, S, row_width]
        self.k_cache = State(f"{name}.k_cache", cache_shape, REGISTER.cache_dtype, is_cut)
        self.v_cache = State(f"{name}.v_cache", cache_shape, REGISTER.cache_dtype, is_cut)

    def forward(self, x, tokens):
        """x: [B, T, D], tokens: DecoderTokens whose states hold this layer's caches -> [B, T, D]."""
        parts = [projection(x) for projection in self.qkv]
        parts = parts if len(parts) == 3 else ops.split(parts[0], self.qkv_sizes)
        query, key, value = (ops.reshape(part, (*x.shape[:2], -1, self.head_dim)) for part in parts)
        if self.q_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        if self.rope:
            query, key = self.rope(query, key, tokens)
        mixed, tokens.states[self.k_cache], tokens.states[self.v_cache] = ops.attention(
            query, key, value, tokens.states[self.k_cache], tokens.states[self.v_cache],
            tokens.cache_len, tokens.num_tokens, self.scale,
            window=self.window,
            context_len=tokens.row["context_len"] if self.use_prefix else None,
            alibi_slopes=None if self.alibi_slopes is None else self._of_rank(x, self.alibi_slopes),
        )  # fmt: skip
        mixed = ops.reshape(mixed, (*x.shape[:2], -1))
        if self.head_mask is not None:
            mixed = mixed * self._of_rank(x, self.head_mask)
        return self.out(mixed)

    def _of_rank(self, x, table):
        """This rank's row of a table [R, n]: [n]."""
        if self.world_size == 1:
            return x.graph.constant(table[0])
        rank = ops.reshape(ops.rank_index(x, self.world_size), (1,))
        return ops.reshape(ops.gather(x.graph.constant(table), rank), (-1,))

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
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = head_dim or hidden_size // num_heads
        self.scale = 1 / math.sqrt(self.head_dim) if scale is None else scale
        self.qkv_sizes = [count * self.head_dim for count in (num_heads, num_kv_heads, num_kv_heads)]
        widths = [sum(self.qkv_sizes)] if len(qkv) == 1 else self.qkv_sizes
        self.qkv = [
            Linear(f"{name}.{key}", hidden_size, width, bias, shard="column") for key, width in zip(qkv, widths, strict=True)
        ]
        out_bias = bias if out_bias is None else out_bias
        self.out = Linear(f"{name}.{out}", num_heads * self.head_dim, hidden_size, out_bias, shard="row")
        self.rope = rope
        self.window, self.use_prefix = window, use_prefix
        self.alibi_slopes = None if alibi_slopes is None else np.asarray(alibi_slopes, np.float32)
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:
            self.q_norm, self.k_norm = (qk_norm(f"{name}.{key}", self.head_dim, qk_norm_eps) for key in qk_norm_names)
        width = row_width(self.head_dim, REGISTER.cache_dtype)
        cache_shape = (REGISTER.batch_size, num_kv_heads, REGISTER.max_length, width)  # [B, K, S, row_width]
        self.k_cache = State(f"{name}.k_cache", cache_shape, REGISTER.cache_dtype)
        self.v_cache = State(f"{name}.v_cache", cache_shape, REGISTER.cache_dtype)

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
            alibi_slopes=None if self.alibi_slopes is None else x.graph.constant(self.alibi_slopes),
        )  # fmt: skip
        return self.out(ops.reshape(mixed, (*x.shape[:2], -1)))

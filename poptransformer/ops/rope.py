"""rope: rotary position embedding."""

from __future__ import annotations

import numpy as np

from poptransformer.graph import Value
from poptransformer.ops.op import define, emit, require, require_float, widen


def rope_reference(x, position_ids, inv_freq, attention_scale, interleaved):
    """Pair i of the leading features, (a, b), becomes (a cos - b sin, b cos + a sin) of the angle position * inv_freq[i]."""
    half = len(inv_freq)
    angles = position_ids[:, :, None, None].astype(inv_freq.dtype) * inv_freq  # [B, T, 1, rotary_dim / 2]
    cos, sin = attention_scale * np.cos(angles), attention_scale * np.sin(angles)
    turned, first, second = widen(x), slice(0, half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = turned[..., first].copy(), turned[..., second].copy()
    turned[..., first], turned[..., second] = a * cos - b * sin, b * cos + a * sin
    return [turned.astype(x.dtype)]


def _infer(x, position_ids, inv_freq, attention_scale, interleaved):
    require(x.rank == 4, "wants x [B, T, N, H]")
    require_float(x)
    b, t, _, h = x.shape
    require(position_ids.shape == (b, t) and position_ids.dtype == np.int32, f"position_ids must be int32 [{b}, {t}]")
    require(inv_freq.rank == 1 and inv_freq.dtype == np.float32, "inv_freq must be float32 [rotary_dim / 2]")
    require(2 * inv_freq.shape[0] <= h, f"{inv_freq.shape[0]} pairs turn {2 * inv_freq.shape[0]} features, x has {h}")
    return [x]


define("rope", _infer, rope_reference)


def rope(x: Value, position_ids: Value, inv_freq: Value, attention_scale: float = 1.0, interleaved: bool = False) -> Value:
    """Rotate pairs of features by an angle that grows with position.

    Pair i turns by position * inv_freq[i] radians. Angles and products are float32, and the result is rounded once. All
    kinds of scaling for long texts are other frequencies, and are worked out when the graph is built.

    Args:
      x: [B, T, N, H] queries, or keys with K for N.
      position_ids: [B, T] int32, counted from 0.
      inv_freq: [rotary_dim / 2] float32, radians a position; without scaling theta ** (-2i / rotary_dim). The leading
        rotary_dim features turn, rotary_dim <= H; the others stay.
      attention_scale: factor on the features that turn (yarn's; HF: attention_scaling).
      interleaved: False pairs i with i + rotary_dim / 2 (Llama); True pairs 2i with 2i + 1 (ChatGLM2).
    Returns: [B, T, N, H], dtype of x.
    Source: Su et al. 2021, arXiv:2104.09864; apply_rotary_pos_emb in HF modeling_llama.py.
    """
    scale, interleaved = float(attention_scale), bool(interleaved)
    return emit("rope", x, position_ids, inv_freq, attention_scale=scale, interleaved=interleaved)[0]

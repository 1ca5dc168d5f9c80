"""layer_norm: normalise the last axis to mean 0 and variance 1, then scale and shift."""

from __future__ import annotations

import numpy as np

from poptransformer.graph import Value
from poptransformer.ops.op import define, emit, require, require_float, widen


def layer_norm_reference(x, weight, bias, eps):
    """(x - mean) / sqrt(variance + eps) * weight + bias, in float32 or wider."""
    wide = widen(x)
    centred = wide - wide.mean(-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return [(normed * weight.astype(wide.dtype) + bias.astype(wide.dtype)).astype(x.dtype)]


def _infer(x, weight, bias, eps):
    for spec in (x, weight, bias):
        require_float(spec)
    require(x.rank >= 1, "wants a last axis")
    require(weight.shape == x.shape[-1:] and bias.shape == x.shape[-1:], f"weight and bias must be [{x.shape[-1]}]")
    return [x]


define("layer_norm", _infer, layer_norm_reference)


def layer_norm(x: Value, weight: Value, bias: Value, eps: float) -> Value:
    """Layer normalisation over the last axis; statistics are computed in float32.

    Args:
      x: [..., D].
      weight, bias: [D].
      eps: added to the variance under the root.
    Returns: [..., D], dtype of x.
    Source: Ba et al. 2016, arXiv:1607.06450.
    """
    return emit("layer_norm", x, weight, bias, eps=float(eps))[0]

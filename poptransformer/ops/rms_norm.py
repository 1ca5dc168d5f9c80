"""rms_norm: divide the last axis by its root mean square, then scale."""

from __future__ import annotations

import numpy as np

from poptransformer.graph import Value
from poptransformer.ops.op import define, emit, require, require_float, widen


def rms_norm_reference(x, weight, eps):
    """x / sqrt(mean(x^2) + eps) in float32 or wider, rounded to the dtype of x; then times weight, rounded again."""
    wide = widen(x)
    normed = (wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps)).astype(x.dtype)
    return [(widen(normed) * widen(weight)).astype(x.dtype)]


def _infer(x, weight, eps):
    require_float(x)
    require_float(weight)
    require(x.rank >= 1 and x.shape[-1] > 0, "wants a last axis with elements")
    require(weight.shape == x.shape[-1:], f"weight must be [{x.shape[-1]}]")
    return [x]


define("rms_norm", _infer, rms_norm_reference)


def rms_norm(x: Value, weight: Value, eps: float) -> Value:
    """Root-mean-square normalisation over the last axis; the mean is computed in float32.

    16-bit results are rounded before the weight and after it, in the order of HF's LlamaRMSNorm. A compiler may leave the
    first rounding out, which brings the result closer to the formula.

    Args:
      x: [..., D].
      weight: [D].
      eps: added to the mean of the squares under the root.
    Returns: [..., D], dtype of x.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467; LlamaRMSNorm in HF modeling_llama.py.
    """
    return emit("rms_norm", x, weight, eps=float(eps))[0]

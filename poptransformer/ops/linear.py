"""linear and matmul: products with float32 sums."""

from __future__ import annotations

import numpy as np

from poptransformer.graph import Spec, Value
from poptransformer.ops.elementwise import broadcast_shape
from poptransformer.ops.op import define, emit, require, require_float


def matmul_reference(x, y, out_dtype):
    """x [..., T, I] times y [..., I, O], summed in float32 or wider."""
    wide = np.result_type(np.float32, *(a.dtype for a in (x, y) if a.dtype == np.float64))
    return [np.matmul(x.astype(wide), y.astype(wide)).astype(out_dtype)]


def linear_reference(x, weight, bias, out_dtype):
    """y = x W^T + b, summed in float32 or wider; the bias is added before the result is rounded."""
    wide = np.result_type(np.float32, *(a.dtype for a in (x, weight) if a.dtype == np.float64))
    y = x.astype(wide) @ weight.astype(wide).T
    if bias is not None:
        y = y + bias.astype(wide)
    return [y.astype(out_dtype)]


def _infer_matmul(x, y, out_dtype):
    require_float(x)
    require(x.rank >= 2 and y.rank >= 2, "wants at least two axes each")
    require(x.dtype == y.dtype, "operands differ in dtype")
    require(x.shape[-1] == y.shape[-2], f"inner sizes differ: {x.shape[-1]} and {y.shape[-2]}")
    return [Spec(broadcast_shape(x.shape[:-2], y.shape[:-2]) + (x.shape[-2], y.shape[-1]), out_dtype)]


def _infer_linear(x, weight, bias, out_dtype):
    for spec in (x, weight) if bias is None else (x, weight, bias):
        require_float(spec)
    require(x.rank >= 1 and weight.rank == 2, "wants x [..., in_features] and weight [out_features, in_features]")
    require(x.shape[-1] == weight.shape[1], f"x has {x.shape[-1]} features, the weight wants {weight.shape[1]}")
    if bias is not None:
        require(bias.shape == weight.shape[:1], f"bias must be [{weight.shape[0]}]")
    return [Spec(x.shape[:-1] + weight.shape[:1], out_dtype)]


define("matmul", _infer_matmul, matmul_reference)
define("linear", _infer_linear, linear_reference)


def matmul(x: Value, y: Value, out_dtype=None) -> Value:
    """Matrix product of the last two axes; leading axes broadcast.

    Args:
      x: [..., T, I].
      y: [..., I, O].
      out_dtype: dtype of the result; None takes that of x.
    """
    return emit("matmul", x, y, out_dtype=np.dtype(out_dtype or x.dtype))[0]


def linear(x: Value, weight: Value, bias: Value | None = None, out_dtype=None) -> Value:
    """Apply a weight matrix to the last axis of x: y = x W^T + b.

    A whole op because this is where nearly all bytes of a decode step are read: kernels and packed weights go here.

    Args:
      x: [..., in_features].
      weight: [out_features, in_features], the layout of torch.nn.Linear: a step with few rows then reads it in order.
      bias: [out_features] or None.
      out_dtype: dtype of the result; None takes that of x.
    Returns: [..., out_features].
    """
    return emit("linear", x, weight, bias, out_dtype=np.dtype(out_dtype or x.dtype))[0]

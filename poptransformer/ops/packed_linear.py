"""packed_linear and packed_gather: products with, and rows of, weights that are packed integer codes."""

from __future__ import annotations

import numpy as np

from poptransformer.graph import Spec, Value
from poptransformer.ops.op import define, emit, require, require_float
from poptransformer.packing import BLOCK_ROWS, Packing


def packed_linear_reference(x, weight, bias, packing, out_dtype):
    """y = x W^T + b with the W that the packed bytes stand for; x is taken as it is."""
    wide = np.result_type(np.float32, *(a.dtype for a in (x,) if a.dtype == np.float64))
    y = x.astype(wide) @ packing.unpack(weight).astype(wide).T
    if bias is not None:
        y = y + bias.astype(wide)
    return [y.astype(out_dtype)]


def packed_gather_reference(weight, indices, packing, out_dtype):
    """Rows of the W that the packed bytes stand for."""
    indices = np.clip(indices, 0, packing.out_features - 1)
    blocks = packing.unpack_blocks(weight[indices.reshape(-1) // BLOCK_ROWS]).reshape(-1, BLOCK_ROWS, packing.in_features)
    rows = blocks[np.arange(indices.size), indices.reshape(-1) % BLOCK_ROWS]
    return [rows.reshape(*indices.shape, packing.in_features).astype(out_dtype)]


def _check_weight(weight, packing):
    require(weight.shape == packing.shape and weight.dtype == np.uint8, f"the weight must be uint8 {list(packing.shape)}")


def _infer_linear(x, weight, bias, packing, out_dtype):
    require_float(x)
    _check_weight(weight, packing)
    require(x.rank >= 1 and x.shape[-1] == packing.in_features, f"x must be [..., {packing.in_features}]")
    if bias is not None:
        require_float(bias)
        require(bias.shape == (packing.out_features,), f"bias must be [{packing.out_features}]")
    return [Spec((*x.shape[:-1], packing.out_features), out_dtype)]


def _infer_gather(weight, indices, packing, out_dtype):
    _check_weight(weight, packing)
    require(indices.dtype == np.int32, "indices must be int32")
    return [Spec((*indices.shape, packing.in_features), out_dtype)]


define("packed_linear", _infer_linear, packed_linear_reference)
define("packed_gather", _infer_gather, packed_gather_reference)


def packed_linear(x: Value, weight: Value, packing: Packing, bias: Value | None = None, out_dtype=None) -> Value:
    """As `linear`, with a packed weight.

    Args:
      x: [..., in_features], floating. Kernels may quantise it to 8 bits, each 32 inputs with a scale of their own; sums of
        products are exact, the rest float32.
      weight: uint8 of `packing.shape`.
      packing: what the bytes mean.
      bias: [out_features] or None.
      out_dtype: dtype of the result; None takes that of x.
    Returns: [..., out_features].
    """
    return emit("packed_linear", x, weight, bias, packing=packing, out_dtype=np.dtype(out_dtype or x.dtype))[0]


def packed_gather(weight: Value, indices: Value, packing: Packing, out_dtype) -> Value:
    """As `gather` along axis 0, from a packed table.

    Args:
      weight: uint8 of `packing.shape`, a table [V, D].
      indices: [...] int32; those outside 0 .. V - 1 are held inside.
      out_dtype: dtype of the result.
    Returns: [..., D].
    """
    return emit("packed_gather", weight, indices, packing=packing, out_dtype=np.dtype(out_dtype))[0]

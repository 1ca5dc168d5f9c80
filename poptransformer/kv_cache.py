"""How a KV cache holds the keys, or values, of one position and head: a row of `row_width` elements for H features.

    fp32, bf16, fp16   the H numbers
    fp8                the H numbers in e4m3 (float8.py), those beyond 448 cut off: keys and values are far below it
    int8               H codes -127 .. 127, then the 4 bytes of a float32 scale that they are to be multiplied by

int8 has one scale for each position and head. So a new token is rounded by itself and changes nothing that is stored; a token
or a head with large values costs no other its precision; and what is stored is independent of the batch and of how a prompt
is cut into chunks. Per channel would suit keys a little better, but wants all tokens at once. The scale is largest / 127; rows
whose scale is below 2 ** -100 are zeros, and a row with a value that is not finite has the scale NaN and codes 0.

In Python only the op attention, its XLA lowering and the layer that makes the caches know this, in C++ the kernel.
"""

from __future__ import annotations

import numpy as np

from poptransformer.float8 import FLOAT8, to_float8

INT8 = np.dtype(np.int8)
SCALE_BYTES = 4
LARGEST_CODE = 127
# A product, since compilers turn division by a constant into one. Below the least scale rows count as zeros: 1 / scale
# stays finite, and CPUs that flush what is no normal number to zero give the same codes.
PER_CODE, LEAST_SCALE = np.float32(1 / LARGEST_CODE), np.float32(2.0**-100)


def row_width(head_dim: int, dtype) -> int:
    """Elements of a row of H = head_dim features in a cache of a dtype."""
    return head_dim + SCALE_BYTES if np.dtype(dtype) == INT8 else head_dim


def store(x: np.ndarray, dtype) -> np.ndarray:
    """Rows of a cache for keys or values: [..., H] floating -> [..., row_width] of the dtype."""
    dtype = np.dtype(dtype)
    if dtype == FLOAT8:
        return to_float8(x)
    if dtype != INT8:
        with np.errstate(over="ignore"):
            return x.astype(dtype)
    wide = x.astype(np.float32)
    is_finite = np.isfinite(wide).all(-1, keepdims=True)
    wide = np.where(is_finite, wide, np.float32(0))
    scale = np.abs(wide).max(-1, keepdims=True, initial=0) * PER_CODE
    scale = np.where(scale < LEAST_SCALE, np.float32(0), scale)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    codes = np.rint(wide * inverse).astype(np.int8)
    scale = np.where(is_finite, scale, np.float32(np.nan))
    return np.concatenate([codes, np.ascontiguousarray(scale).view(np.int8)], axis=-1)


def load(rows: np.ndarray, dtype=np.float32) -> np.ndarray:
    """The numbers that rows of a cache stand for: [..., row_width] -> [..., H] of a floating dtype."""
    if rows.dtype != INT8:
        return rows.astype(dtype)
    scale = np.ascontiguousarray(rows[..., -SCALE_BYTES:]).view(np.float32)
    return rows[..., :-SCALE_BYTES].astype(dtype) * scale.astype(dtype)

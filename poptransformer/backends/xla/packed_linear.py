"""XLA lowerings of packed_linear and packed_gather: the project's kernel where it is built, else unpacking in jnp."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from poptransformer.backends.xla.lowering import lowering, product
from poptransformer.float8 import FLOAT8
from poptransformer.packing import BLOCK_ROWS, UNIT, ZERO_CODES


@lowering("packed_linear")
def packed_linear(context, x, weight, bias, packing, out_dtype):
    if context.use_kernel("packed_linear", isa=lambda: _kernel().packed_linear_isa(x)):
        return _kernel().packed_linear(x, weight, bias, packing, out_dtype)
    if math.prod(x.shape[:-1]) == 1:
        y = _one_row(x.reshape(-1), weight, packing).reshape(*x.shape[:-1], -1)
    else:
        values = _rows(_unpack(weight, packing), packing)[: packing.out_features].astype(x.dtype)
        y = product(x, values, (((x.ndim - 1,), (1,)), ((), ())))
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(out_dtype)


@lowering("packed_gather")
def packed_gather(context, weight, indices, packing, out_dtype):
    indices = jnp.clip(indices, 0, packing.out_features - 1)
    flat = indices.reshape(-1)
    if context.use_kernel("gather"):
        blocks = _kernel().gather(weight, flat // BLOCK_ROWS)
    else:
        blocks = jnp.take(weight, flat // BLOCK_ROWS, axis=0)
    values = _rows(_unpack(blocks, packing), packing).reshape(flat.size, BLOCK_ROWS, packing.in_features)
    rows = jnp.take_along_axis(values, (flat % BLOCK_ROWS)[:, None, None], axis=1)
    return rows.reshape(*indices.shape, packing.in_features).astype(out_dtype)


def _kernel():
    from poptransformer.backends.xla import custom_ops

    return custom_ops


def _unpack(packed, packing):
    """Values as they lie: [n, units, 8, 16, 4] float32 for n blocks."""
    num_blocks = packed.shape[0]
    codes = packed[:, : packing.code_bytes].reshape(num_blocks, packing.num_units, -1, BLOCK_ROWS, 4)
    if packing.bits == 4:
        codes = jnp.concatenate([codes & 15, codes >> 4], axis=2)
    if packing.kind == "fp8":
        codes = jax.lax.bitcast_convert_type(codes, FLOAT8)
    at, scale_bytes = packing.code_bytes, packing.scale_bytes
    values = (codes.astype(jnp.float32) - ZERO_CODES[packing.kind]) * _per_unit(packed[:, at : at + scale_bytes], packing)
    if not packing.has_minimums:
        return values
    return values + _per_unit(packed[:, at + scale_bytes : at + 2 * scale_bytes], packing)


def _per_unit(numbers, packing):
    """Numbers of groups, given as bytes, for each unit: [n, units, 1, 16, 1] float32."""
    dtype = packing.scale_dtype
    numbers = jax.lax.bitcast_convert_type(numbers.reshape(-1, packing.num_groups, BLOCK_ROWS, dtype.itemsize), dtype)
    group_of = np.arange(packing.num_units) // packing.units_per_group
    return numbers[:, group_of].astype(jnp.float32)[:, :, None, :, None]


def _rows(values, packing):
    """[n, units, 8, 16, 4] -> [16 * n, I]."""
    return values.transpose(0, 3, 1, 2, 4).reshape(values.shape[0] * BLOCK_ROWS, -1)[:, : packing.in_features]


def _one_row(x, weight, packing):
    """The product for one row of x [I] without moving codes: multiply where they lie, then add up. [O] float32."""
    padded = jnp.pad(x.astype(jnp.float32), (0, packing.num_units * UNIT - packing.in_features))
    products = _unpack(weight, packing) * padded.reshape(packing.num_units, 8, 1, 4)
    return products.sum((1, 2, 4)).reshape(-1)[: packing.out_features]

"""XLA lowerings of packed_linear and packed_gather: the project's kernel where there is one, else plain XLA."""

import dataclasses

import jax
import jax.numpy as jnp

from poptransformer.backends.xla import packed_rows
from poptransformer.backends.xla.lowering import lowering
from poptransformer.backends.xla.packed_rows import PackedRows
from poptransformer.packing import BLOCK_ROWS

MOST_GPU_ROWS = 8  # of x; with more, unpacking the matrix once is cheaper than multiplying codes for each


@lowering("packed_linear")
def packed_linear(context, x, weight, bias, packing, out_dtype):
    rows = x.reshape(-1, x.shape[-1])
    if context.platform == "gpu":
        has_kernel = context.use_kernel("packed_linear", lambda: _gpu_refusal(rows, packing))
    elif context.use_kernel("packed_linear", isa=lambda: _kernel().packed_linear_isa(x)):
        return _kernel().packed_linear(x, weight, bias, packing, out_dtype)
    else:
        has_kernel = False
    weight = _rearranged(weight, packing)
    if has_kernel:
        from poptransformer.backends.xla import packed_linear_gpu

        y = packed_linear_gpu.few_rows_product(rows, weight, packing)
    elif len(rows) == 1:
        y = packed_rows.one_row_product(rows[0], weight, packing)[None]
    else:
        y = packed_rows.many_rows_product(rows, weight, packing)
    y = y.reshape(*x.shape[:-1], packing.out_features)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(out_dtype)


@lowering("packed_gather")
def packed_gather(context, weight, indices, packing, out_dtype):
    indices = jnp.clip(indices, 0, packing.out_features - 1)
    flat = indices.reshape(-1)
    if context.use_kernel("gather"):
        gathered = dataclasses.replace(packing, out_features=flat.size * BLOCK_ROWS)
        table = packed_rows.rearrange(_kernel().gather(weight, flat // BLOCK_ROWS), gathered)
        flat = jnp.arange(flat.size) * BLOCK_ROWS + flat % BLOCK_ROWS
    else:
        table = _rearranged(weight, packing)
    rows = jax.tree.map(lambda part: part[flat], table)
    return packed_rows.unpack(rows, packing).reshape(*indices.shape, packing.in_features).astype(out_dtype)


def _kernel():
    from poptransformer.backends.xla import custom_ops

    return custom_ops


def _gpu_refusal(rows, packing):
    """Why the kernel for GPUs does not take rows of x with a packed weight; None if it does."""
    if packing.kind == "fp8":
        return "fp8, the kernel takes int8 and int4"
    return f"{len(rows)} rows, the kernel takes up to {MOST_GPU_ROWS}" if len(rows) > MOST_GPU_ROWS else None


def _rearranged(weight, packing):
    """Parameters are rearranged when they are loaded, what a graph computes is here."""
    return weight if isinstance(weight, PackedRows) else packed_rows.rearrange(weight, packing)

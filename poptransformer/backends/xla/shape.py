"""XLA lowerings of the ops that move elements."""

import jax.numpy as jnp
from jax import lax

from poptransformer.backends.xla.lowering import lowering


@lowering("reshape")
def reshape(context, x, shape):
    return x.reshape(shape)


@lowering("transpose")
def transpose(context, x, axes):
    return x.transpose(axes)


@lowering("broadcast_to")
def broadcast_to(context, x, shape):
    return jnp.broadcast_to(x, shape)


@lowering("split")
def split(context, x, sizes, axis):
    return tuple(lax.split(x, sizes, axis))


@lowering("concat")
def concat(context, *parts, axis):
    return jnp.concatenate(parts, axis)


@lowering("slice")
def slice_axis(context, x, start, stop, axis):
    return lax.slice_in_dim(x, start, stop, axis=axis)


@lowering("dynamic_update")
def dynamic_update(context, x, update, start, axis):
    return lax.dynamic_update_slice_in_dim(x, update, jnp.maximum(start, 0), axis)  # JAX would count -1 from the end


@lowering("gather")
def gather(context, table, indices):
    if context.use_kernel("gather", lambda: None if table.ndim == 2 else f"a table of {table.ndim} axes, the kernel takes 2"):
        from poptransformer.backends.xla import custom_ops

        return custom_ops.gather(table, indices)
    # Ids are checked where they enter; the mode only spares the compiler a second check.
    return table.at[indices].get(mode="promise_in_bounds")

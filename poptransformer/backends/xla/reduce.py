"""XLA lowerings of the reductions."""

import jax.numpy as jnp

from poptransformer.backends.xla.lowering import lowering


@lowering("reduce_sum")
def reduce_sum(context, x, axis):
    return jnp.sum(x, axis).astype(x.dtype)  # jnp adds 16-bit floats up in float32, small integers in int32


@lowering("reduce_max")
def reduce_max(context, x, axis):
    return jnp.max(x, axis)


@lowering("reduce_any")
def reduce_any(context, x, axis):
    return jnp.any(x, axis)


@lowering("argmax")
def argmax(context, x, axis):
    return jnp.argmax(x, axis).astype(jnp.int32)

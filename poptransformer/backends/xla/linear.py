"""XLA lowerings of linear and matmul: XLA's own products, with float32 sums."""

import jax.numpy as jnp
from jax import lax

from poptransformer.backends.xla.lowering import lowering


@lowering("matmul")
def matmul(context, x, y, out_dtype):
    return jnp.matmul(x, y, preferred_element_type=jnp.float32).astype(out_dtype)


@lowering("linear")
def linear(context, x, weight, bias, out_dtype):
    dimensions = (((x.ndim - 1,), (1,)), ((), ()))
    y = lax.dot_general(x, weight, dimensions, preferred_element_type=jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(out_dtype)

"""XLA lowerings of linear and matmul: the project's kernel for few rows where it is built, else XLA's own products."""

import math

import jax
import jax.numpy as jnp

from poptransformer.backends.xla.lowering import lowering, product


@lowering("matmul")
def matmul(context, x, y, out_dtype):
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.matmul(x, y, precision=precision, preferred_element_type=jnp.float32).astype(out_dtype)


@lowering("linear")
def linear(context, x, weight, bias, out_dtype):
    if "linear" in context.custom_ops:
        from poptransformer.backends.xla import custom_ops

        if math.prod(x.shape[:-1]) <= custom_ops.MAX_LINEAR_ROWS:
            return custom_ops.linear(x, weight, bias, out_dtype)
    y = product(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(out_dtype)

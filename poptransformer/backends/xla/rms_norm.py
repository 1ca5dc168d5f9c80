"""XLA lowering of rms_norm."""

import jax.numpy as jnp
from jax import lax

from poptransformer.backends.xla.lowering import lowering


@lowering("rms_norm")
def rms_norm(context, x, weight, eps):
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt((wide**2).mean(-1, keepdims=True) + eps)
    return (normed.astype(x.dtype).astype(jnp.float32) * weight.astype(jnp.float32)).astype(x.dtype)

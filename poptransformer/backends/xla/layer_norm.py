"""XLA lowering of layer_norm."""

import jax.numpy as jnp
from jax import lax

from poptransformer.backends.xla.lowering import lowering


@lowering("layer_norm")
def layer_norm(context, x, weight, bias, eps):
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    normed = centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + eps)
    return (normed * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)

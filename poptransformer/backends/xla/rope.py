"""XLA lowering of rope."""

import jax.numpy as jnp

from poptransformer.backends.xla.lowering import lowering


@lowering("rope")
def rope(context, x, position_ids, inv_freq, attention_scale, interleaved):
    half = inv_freq.shape[0]
    angles = position_ids[:, :, None, None].astype(jnp.float32) * inv_freq  # [B, T, 1, rotary_dim / 2]
    cos, sin = attention_scale * jnp.cos(angles), attention_scale * jnp.sin(angles)
    turned, rest = x[..., : 2 * half].astype(jnp.float32), x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(turned.shape)
    else:
        a, b = turned[..., :half], turned[..., half:]
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    return jnp.concatenate([turned.astype(x.dtype), rest], -1)

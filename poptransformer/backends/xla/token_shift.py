"""XLA lowering of token_shift."""

import jax.numpy as jnp

from poptransformer.backends.xla.lowering import lowering


@lowering("token_shift")
def token_shift(context, x, shift_state, cache_len, num_tokens, *mixes):
    wide = x.astype(jnp.float32)
    before = jnp.where(cache_len[:, None] > 0, shift_state, 0)[:, None]  # [B, 1, D]
    previous = jnp.concatenate([before, wide[:, :-1]], 1)  # [B, T, D]
    mixed = []
    for mix in mixes:
        mix = mix.astype(jnp.float32)
        mixed.append((mix * wide + (1 - mix) * previous).astype(x.dtype))
    newest = jnp.take_along_axis(wide, jnp.maximum(num_tokens - 1, 0)[:, None, None], axis=1)[:, 0]
    return *mixed, jnp.where(num_tokens[:, None] > 0, newest, shift_state)

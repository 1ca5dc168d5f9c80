"""XLA lowerings of softmax and token_log_prob."""

import jax
import jax.numpy as jnp

from poptransformer.backends.xla.lowering import lowering


@lowering("softmax")
def softmax(context, x):
    return jax.nn.softmax(x.astype(jnp.float32), axis=-1).astype(x.dtype)


@lowering("token_log_prob")
def token_log_prob(context, logits, token_ids):
    top = logits.max(-1)
    chosen = jnp.take_along_axis(logits, token_ids[..., None], axis=-1)[..., 0]
    # Not chosen - logsumexp: of two numbers far from 0 the difference has few digits left.
    return (chosen - top) - jnp.log(jnp.exp(logits - top[..., None]).sum(-1))

"""XLA lowering of wkv: the project's kernel where it is built, else plain XLA."""

import math

import jax.numpy as jnp
from jax import lax

from poptransformer.backends.xla.lowering import lowering
from poptransformer.ops.wkv import EMPTY

_FASTEST_DECAY = 1e30  # finite, so that times 0 it is 0


@lowering("wkv")
def wkv(context, key, value, time_decay, time_first, wkv_state, cache_len, num_tokens):
    if context.use_kernel("wkv"):
        from poptransformer.backends.xla import custom_ops

        return custom_ops.wkv(key, value, time_decay, time_first, wkv_state, cache_len, num_tokens)
    return plain_wkv(key, value, time_decay, time_first, wkv_state, cache_len, num_tokens)


def plain_wkv(key, value, time_decay, time_first, wkv_state, cache_len, num_tokens):
    """The op in jnp; shapes and meaning as in `poptransformer.ops.wkv`.

    Sums over tokens are triples (numerator, denominator, maximum), and two of neighbouring runs of tokens can be joined. So a
    row is cut into chunks of about sqrt(T) tokens: first all chunks are summed side by side, then the sums of whole chunks are
    added up one after the other, then each token joins what its chunk had before it with what came before the chunk. That is
    2 * sqrt(T) steps on arrays of [B, sqrt(T), D] and [B, D].

    Beside it, for T = 512 and D = 768 on 2 cores: one step a token takes 0.6 of its time there, but would be 512 steps for a
    GPU; jax.lax.associative_scan takes 2.3 times as long and compiles for 2.6 s a layer instead of 0.5 s; doubling the
    distance of what is joined (9 passes over everything) 20 times; the weights of all pairs of tokens in chunks of 16, 8 times.
    """
    num_rows, num_new, width = key.shape
    decay = -jnp.minimum(jnp.exp(time_decay), _FASTEST_DECAY)
    is_empty = cache_len[:, None] == 0
    before = [jnp.where(is_empty, empty, part) for empty, part in zip((0, 0, EMPTY), _unstack(wkv_state), strict=True)]
    is_token = (jnp.arange(num_new) < num_tokens[:, None])[..., None]  # [B, T, 1]
    tokens = _tokens(key, value, is_token)
    if num_new == 1:
        token = [part[:, 0] for part in tokens]
        out = _ratio(_join(before, _scaled(token, time_first)))[:, None]
        after = _join(_scaled(before, decay), token)
    else:
        length = 2 ** round(math.log2(num_new) / 2)
        count = -(-num_new // length)
        room = ((0, 0), (0, count * length - num_new), (0, 0))
        tokens = [jnp.pad(part, room, constant_values=empty) for part, empty in zip(tokens, (0, 0, EMPTY), strict=True)]
        # Position in the chunk, row, chunk, feature: [length, B, count, D].
        tokens = [part.reshape(num_rows, count, length, width).transpose(2, 0, 1, 3) for part in tokens]
        empty = [jnp.full(tokens[0].shape[1:], number, jnp.float32) for number in (0, 0, EMPTY)]
        # Padding at the end of a row does not make it older.
        tokens_left = num_tokens - length * jnp.arange(count)[:, None]  # [count, B]
        ages = jnp.clip(tokens_left, 0, length).astype(jnp.float32)[..., None]
        steps = (jnp.arange(length)[:, None, None] < tokens_left.T)[..., None]  # [length, B, count, 1]
        sums, inside = lax.scan(_adding(decay), empty, (steps, tokens))
        after, outside = lax.scan(_adding(decay), before, (ages, [part.swapaxes(0, 1) for part in sums]))
        outside = [part.swapaxes(0, 1) for part in outside]  # [B, count, D]
        age = jnp.arange(length, dtype=jnp.float32)[:, None, None, None]
        out = _ratio(_join(_join(_scaled(outside, decay * age), inside), _scaled(tokens, time_first)))
        out = out.transpose(1, 2, 0, 3).reshape(num_rows, count * length, width)[:, :num_new]
    has_tokens = num_tokens[:, None, None] > 0
    return jnp.where(is_token, out, 0).astype(key.dtype), jnp.where(has_tokens, jnp.stack(after, 1), wkv_state)


def _unstack(state):
    return [state[:, i] for i in range(3)]


def _tokens(key, value, is_token):
    """Each token as a sum of its own, padding as an empty one."""
    numerator = jnp.where(is_token, value.astype(jnp.float32), 0)
    denominator = jnp.broadcast_to(is_token, key.shape).astype(jnp.float32)
    return [numerator, denominator, jnp.where(is_token, key.astype(jnp.float32), EMPTY)]


def _scaled(sums, exponent):
    """Sums times e^exponent."""
    numerator, denominator, maximum = sums
    return [numerator, denominator, maximum + exponent]


def _adding(decay):
    """A step of a scan: (age, newer) -> sums with the newer ones, and the sums before."""

    def step(sums, pair):
        age, newer = pair
        return _join(_scaled(sums, decay * age), newer), sums

    return step


def _join(older, newer):
    """The sum over two runs of tokens; `older` has decayed by the length of `newer`."""
    is_less = older[2] < newer[2]
    maximum = jnp.maximum(older[2], newer[2])
    smaller = jnp.exp(jnp.minimum(older[2], newer[2]) - maximum)  # the other one's weight is 1
    old, new = jnp.where(is_less, smaller, 1), jnp.where(is_less, 1, smaller)
    return [old * older[0] + new * newer[0], old * older[1] + new * newer[1], maximum]


def _ratio(sums):
    return sums[0] / sums[1]

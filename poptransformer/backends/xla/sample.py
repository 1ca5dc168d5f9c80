"""XLA lowerings of sample, repetition_penalty and mark_tokens.

Nothing is sorted: the k-th best logit and the top-p border are found by bisection over the bits of a float, 32 passes over
the vocabulary, each a masked sum. That costs the same for every setting, and sums over a cut vocabulary add up.
"""

import jax.numpy as jnp
from jax import lax

from poptransformer.backends.xla.lowering import lowering
from poptransformer.ops.sample import LEAST_TEMPERATURE, THREEFRY_PARITY, THREEFRY_ROTATIONS


@lowering("sample")
def sample(context, logits, temperature, top_k, top_p, min_p, seed, position, top_k_limit=None):
    best = _best_on_cpu if context.platform == "cpu" else _best

    def greedy():
        return best(logits)

    def drawn():
        divisor = jnp.where(temperature > 0, jnp.maximum(temperature, LEAST_TEMPERATURE), 1)
        scaled = logits / divisor[:, None]
        keep = _keep_mask(scaled, top_k, top_p, min_p)
        noisy = jnp.where(keep, scaled + _gumbel_noise(seed, position, logits.shape[1]), -jnp.inf)
        return jnp.where(temperature > 0, best(noisy), greedy())

    return lax.cond(jnp.any(temperature > 0), drawn, greedy)


@lowering("repetition_penalty")
def repetition_penalty(context, logits, seen, penalty):
    factor = penalty[:, None]
    return jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)


@lowering("mark_tokens")
def mark_tokens(context, seen, token_ids, num_tokens):
    num_rows, num_new = token_ids.shape
    is_token = jnp.arange(num_new) < num_tokens[:, None]
    beyond = jnp.where(is_token, token_ids, seen.shape[1])  # padding points past the end and is dropped
    return seen.at[jnp.arange(num_rows)[:, None], beyond].set(True, mode="drop")


def _best(x):
    """Index of the largest element of each row [B, V], the first of equals, or of the first NaN: [B] int32."""
    return jnp.argmax(x, -1).astype(jnp.int32)


def _best_on_cpu(x):
    """The same in two reductions of one array each, which XLA:CPU makes vector loops of: for a vocabulary of 49,152 they take
    65 us instead of 160, about what int4 weights take for 2 MB."""
    is_best = (x == x.max(-1, keepdims=True)) | jnp.isnan(x)
    return jnp.where(is_best, jnp.arange(x.shape[-1], dtype=jnp.int32), x.shape[-1]).min(-1)


def _keep_mask(scaled, top_k, top_p, min_p):
    """As `keep_mask` in poptransformer.ops.sample, for all rows: [B, V] -> [B, V] bool."""
    ordered = _ordered_bits(scaled)
    best = scaled.max(-1, keepdims=True)
    count = jnp.where(top_k > 0, jnp.minimum(top_k, scaled.shape[1]), scaled.shape[1])
    everything = jnp.ones(scaled.shape, bool)

    def kept_by_top_k():
        return ordered >= _largest_border(ordered, jnp.ones_like(scaled), count.astype(jnp.float32))[:, None]

    keep = lax.cond(jnp.any(top_k > 0), kept_by_top_k, lambda: everything)

    def kept_by_top_p():
        probability = jnp.where(keep, jnp.exp(scaled - best), 0)
        border = _largest_border(ordered, probability, top_p * probability.sum(-1))
        return (top_p >= 1)[:, None] | (ordered >= border[:, None])

    keep &= lax.cond(jnp.any(top_p < 1), kept_by_top_p, lambda: everything)
    return keep & (scaled >= best + jnp.log(jnp.maximum(min_p, jnp.finfo(jnp.float32).tiny))[:, None])


def _largest_border(ordered, weight, wanted):
    """The largest border for which the weights of the elements at or above it sum to at least `wanted`: [B] uint32."""

    def set_bit(i, border):
        trial = border | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        total = jnp.where(ordered >= trial[:, None], weight, 0).sum(-1)
        return jnp.where(total >= wanted, trial, border)

    return lax.fori_loop(0, 32, set_bit, jnp.zeros(ordered.shape[:1], jnp.uint32))


def _ordered_bits(x):
    """Map float32 to uint32 so that the order stays: flip all bits of negatives, the sign bit of the others."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)  # -0 equals 0
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _gumbel_noise(seed, position, vocab_size):
    token = jnp.arange(vocab_size, dtype=jnp.uint32)[None]
    bits = _threefry2x32((seed[:, :1], seed[:, 1:]), (position.astype(jnp.uint32)[:, None], token))
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log(uniform))


def _threefry2x32(key, counter):
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(THREEFRY_PARITY))
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for rotation in THREEFRY_ROTATIONS[group % 2]:
            x = x + y
            y = ((y << rotation) | (y >> (32 - rotation))) ^ x
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x

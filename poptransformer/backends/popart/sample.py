"""PopART lowerings of sample, repetition_penalty and mark_tokens.

Settings that are constants of the graph cost nothing: with a temperature of 0 in every row the choice is one ArgMax. The border
of top_k comes from TopK, that of top_p from a bisection, so nothing is sorted beyond the largest top_k. The random numbers are
those of the other backends, bit for bit: Threefry in uint32, whose shifts are products and quotients with powers of two.
"""

import numpy as np

from poptransformer.backends.popart.emitter import GRAPHCORE
from poptransformer.backends.popart.lowering import lowering
from poptransformer.errors import UnsupportedError
from poptransformer.ops.sample import LEAST_TEMPERATURE, THREEFRY_PARITY, THREEFRY_ROTATIONS

_LEAST = float(np.finfo(np.float32).min)
_BISECTIONS = 32
_UNLIKELY = 104.0  # a token's logit so far below the best one's has probability 0 in float32


@lowering("sample")
def sample(emitter, logits, temperature, top_k, top_p, min_p, seed, position, top_k_limit=None):
    best = emitter.argmax(logits)
    if temperature.is_constant(0):
        return best
    is_drawn = emitter.greater(temperature, 0.0)
    divisor = emitter.where(is_drawn, emitter.maximum(temperature, LEAST_TEMPERATURE), 1.0)
    scaled = emitter.div(logits, _column(emitter, divisor))
    border = _border(emitter, scaled, top_k, top_p, min_p, top_k_limit)
    noisy = emitter.add(scaled, _gumbel_noise(emitter, seed, position, logits.shape[1]))
    if border is not None:
        noisy = emitter.where(emitter.greater_equal(scaled, border), noisy, _LEAST)
    return emitter.where(is_drawn, emitter.argmax(noisy), best)


@lowering("repetition_penalty")
def repetition_penalty(emitter, logits, seen, penalty):
    if penalty.is_constant(1):
        return logits
    factor = _column(emitter, penalty)
    is_positive = emitter.greater(logits, 0.0)
    return emitter.where(seen, emitter.where(is_positive, emitter.div(logits, factor), emitter.mul(logits, factor)), logits)


@lowering("mark_tokens")
def mark_tokens(emitter, seen, token_ids, num_tokens):
    num_rows, num_new = token_ids.shape
    vocab = emitter.constant(np.arange(seen.shape[1], dtype=np.int32)[None])

    def mark(emitter, seen, token, ids):
        is_token = emitter.less(emitter.reshape(token, (1, 1)), _column(emitter, num_tokens))
        return emitter.logical_or(seen, emitter.logical_and(emitter.equal(vocab, ids), is_token))

    if num_new == 1:
        return mark(emitter, seen, emitter.constant(np.int32(0)), token_ids)

    def body(inner, step, carried):
        ids = inner.dynamic_slice(token_ids, inner.reshape(step, (1,)), 1, 1)
        return inner.constant(np.array(True)), [mark(inner, carried[0], step, ids)]

    return emitter.loop(num_new, emitter.constant(np.array(True)), [seen], body)[0]


def _column(emitter, x):
    """[B] -> [B, 1]"""
    return emitter.reshape(x, (x.shape[0], 1))


def _border(emitter, scaled, top_k, top_p, min_p, top_k_limit):
    """The least scaled logit that may be chosen: [B, 1] float32, or None where each row chooses from all."""
    borders = []
    top = emitter.reduce("ReduceMax", scaled, keepdims=True)
    if not top_k.is_constant(0):
        borders.append(_top_k_border(emitter, scaled, top_k, top_k_limit))
    if not top_p.is_constant(1):
        borders.append(_top_p_border(emitter, scaled, top, top_p, borders))
    if not min_p.is_constant(0):
        least = emitter.maximum(min_p, float(np.finfo(np.float32).tiny))
        borders.append(emitter.add(top, _column(emitter, emitter.unary("Log", least))))
    if not borders:
        return None
    border = borders[0]
    for other in borders[1:]:
        border = emitter.maximum(border, other)
    return border


def _top_k_border(emitter, scaled, top_k, limit):
    """The k-th largest of each row; rows with a top_k of 0 have the least number there is."""
    if limit is None:
        if top_k.array is None:
            raise UnsupportedError("sample: backend popart must know the largest top_k when the graph is built (top_k_limit)")
        limit = int(top_k.array.max())
    limit = min(limit, scaled.shape[1])
    values = emitter.top_values(scaled, limit)  # [B, limit]
    place = emitter.sub(emitter.minimum(top_k, limit), 1)
    is_border = emitter.equal(emitter.constant(np.arange(limit, dtype=np.int32)[None]), _column(emitter, place))
    border = emitter.reduce("ReduceSum", emitter.where(is_border, values, 0.0), keepdims=True)
    return emitter.where(emitter.greater(_column(emitter, top_k), 0), border, _LEAST)


def _top_p_border(emitter, scaled, top, top_p, borders):
    """The largest number for which the tokens at or above it have at least top_p of the probability that is left."""
    probability = emitter.unary("Exp", emitter.sub(scaled, top))
    if borders:
        probability = emitter.where(emitter.greater_equal(scaled, borders[0]), probability, 0.0)
    total = emitter.reduce("ReduceSum", probability, keepdims=True)
    wanted = emitter.mul(total, _column(emitter, top_p))

    def body(inner, step, carried):
        low, high = carried
        middle = inner.mul(inner.add(low, high), 0.5)
        mass = inner.reduce("ReduceSum", inner.where(inner.greater_equal(scaled, middle), probability, 0.0), keepdims=True)
        is_enough = inner.greater_equal(mass, wanted)
        low, high = inner.where(is_enough, middle, low), inner.where(is_enough, high, middle)
        return inner.constant(np.array(True)), [low, high]

    start = [emitter.sub(top, _UNLIKELY), top]
    border, _ = emitter.loop(_BISECTIONS, emitter.constant(np.array(True)), start, body)
    return emitter.where(emitter.less(_column(emitter, top_p), 1.0), border, _LEAST)


def _gumbel_noise(emitter, seed, position, vocab_size):
    """As `gumbel_noise` in poptransformer.ops.sample: [B, V] float32."""
    key = emitter.split(seed, [1, 1], 1)
    token = emitter.constant(np.arange(vocab_size, dtype=np.uint32)[None])
    bits = _threefry2x32(emitter, key, (_column(emitter, emitter.cast(position, np.uint32)), token))
    fraction = emitter.cast(emitter.div(bits, 2**9), np.float32)  # 23 bits
    uniform = emitter.mul(emitter.add(fraction, 0.5), 2.0**-23)
    inner = emitter.unary("Neg", emitter.unary("Log", uniform))
    return emitter.unary("Neg", emitter.unary("Log", inner))


def _threefry2x32(emitter, key, counter):
    def xor(x, y):
        return emitter.binary("BitwiseXor", x, y, GRAPHCORE)

    keys = (*key, xor(xor(key[0], key[1]), THREEFRY_PARITY))
    x, y = emitter.add(counter[0], keys[0]), emitter.add(counter[1], keys[1])
    for group in range(5):
        for rotation in THREEFRY_ROTATIONS[group % 2]:
            x = emitter.add(x, y)
            left, right = emitter.mul(y, 2**rotation), emitter.div(y, 2 ** (32 - rotation))
            y = xor(emitter.binary("BitwiseOr", left, right, GRAPHCORE), x)
        x = emitter.add(x, keys[(group + 1) % 3])
        y = emitter.add(emitter.add(y, keys[(group + 2) % 3]), group + 1)
    return x

"""PopART lowering of wkv: token after token, in a loop of its own where there are many."""

import numpy as np

from poptransformer.backends.popart.lowering import lowering
from poptransformer.ops.wkv import EMPTY

_MOST_UNROLLED = 4


@lowering("wkv")
def wkv(emitter, key, value, time_decay, time_first, wkv_state, cache_len, num_tokens):
    num_rows, num_new, width = key.shape
    decay = emitter.unary("Neg", emitter.unary("Exp", time_decay))
    keys, values = emitter.widen(key), emitter.widen(value)
    state = _begin(emitter, wkv_state, cache_len)

    def advance(emitter, token, k, v, numerator, denominator, maximum):
        """One token [B, D] and the state before it -> out [B, D] and the state after it."""
        is_token = emitter.less(emitter.reshape(token, (1, 1)), emitter.reshape(num_tokens, (num_rows, 1)))
        favoured = emitter.add(time_first, k)
        out = emitter.div(*_mix(emitter, maximum, favoured, numerator, denominator, v)[:2])
        new = _mix(emitter, emitter.add(maximum, decay), k, numerator, denominator, v)
        kept = (numerator, denominator, maximum)
        state = [emitter.where(is_token, after, before) for after, before in zip(new, kept, strict=True)]
        return emitter.where(is_token, out, 0.0), state

    if num_new <= _MOST_UNROLLED:
        rows, outs = (num_rows, width), []
        each_key, each_value = (emitter.split(x, [1] * num_new, 1) for x in (keys, values))
        for t in range(num_new):
            k, v = emitter.reshape(each_key[t], rows), emitter.reshape(each_value[t], rows)
            out, state = advance(emitter, emitter.constant(np.int32(t)), k, v, *state)
            outs.append(emitter.reshape(out, (num_rows, 1, width)))
        out = emitter.concat(outs, 1)
    else:

        def body(inner, step, carried):
            *state, outs = carried
            at = inner.reshape(step, (1,))
            k, v = (inner.reshape(inner.dynamic_slice(x, at, 1, 1), (num_rows, width)) for x in (keys, values))
            out, state = advance(inner, step, k, v, *state)
            outs = inner.dynamic_update(outs, at, inner.reshape(out, (num_rows, 1, width)), 1)
            return inner.constant(np.array(True)), [*state, outs]

        outs = emitter.zeros(key.shape, np.float32)
        *state, out = emitter.loop(num_new, emitter.constant(np.array(True)), [*state, outs], body)
    state = emitter.concat([emitter.reshape(part, (num_rows, 1, width)) for part in state], 1)
    if not wkv_state.is_zero_state:
        has_new = emitter.greater(emitter.reshape(num_tokens, (num_rows, 1, 1)), 0)
        state = emitter.where(has_new, state, wkv_state)
    return emitter.cast(out, key.dtype), state


def _begin(emitter, wkv_state, cache_len):
    """Numerator, denominator and maximum [B, D] before the first token."""
    num_rows, _, width = wkv_state.shape
    empty = [emitter.constant(np.full((num_rows, width), number, np.float32)) for number in (0, 0, EMPTY)]
    if cache_len.is_constant(0):
        return empty
    parts = [emitter.reshape(part, (num_rows, width)) for part in emitter.split(wkv_state, [1, 1, 1], 1)]
    has_tokens = emitter.greater(emitter.reshape(cache_len, (num_rows, 1)), 0)
    return [emitter.where(has_tokens, part, start) for part, start in zip(parts, empty, strict=True)]


def _mix(emitter, old_exponent, new_exponent, numerator, denominator, v):
    """e^old * (numerator, denominator) + e^new * (v, 1), divided by e^maximum, and that maximum."""
    maximum = emitter.maximum(old_exponent, new_exponent)
    old, new = (emitter.unary("Exp", emitter.sub(x, maximum)) for x in (old_exponent, new_exponent))
    numerator = emitter.add(emitter.mul(old, numerator), emitter.mul(new, v))
    return numerator, emitter.add(emitter.mul(old, denominator), new), maximum

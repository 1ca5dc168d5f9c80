"""PopART lowering of token_shift."""

import numpy as np

from poptransformer.backends.popart.lowering import lowering


@lowering("token_shift")
def token_shift(emitter, x, shift_state, cache_len, num_tokens, *mixes):
    num_rows, num_new, width = x.shape
    wide, column = emitter.widen(x), (num_rows, 1)
    if cache_len.is_constant(0):
        before = emitter.zeros(shift_state.shape, np.float32)
    else:
        before = emitter.where(emitter.greater(emitter.reshape(cache_len, column), 0), shift_state, 0.0)
    previous = emitter.reshape(before, (num_rows, 1, width))
    if num_new > 1:
        previous = emitter.concat([previous, emitter.slice(wide, 0, num_new - 1, 1)], 1)
    mixed = []
    for mix in mixes:
        mix = emitter.widen(mix)
        rest = emitter.mul(emitter.sub(emitter.constant(np.float32(1)), mix), previous)
        mixed.append(emitter.cast(emitter.add(emitter.mul(mix, wide), rest), x.dtype))
    newest = wide
    if num_new > 1:
        last = emitter.sub(emitter.reshape(num_tokens, column), 1)
        is_last = emitter.equal(emitter.constant(np.arange(num_new, dtype=np.int32)[None]), last)
        newest = emitter.where(emitter.reshape(is_last, (num_rows, num_new, 1)), wide, 0.0)
    newest = emitter.reduce("ReduceSum", newest, 1)
    is_moved = emitter.greater(emitter.reshape(num_tokens, column), 0)
    return [*mixed, emitter.where(is_moved, newest, shift_state)]

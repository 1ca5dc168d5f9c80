"""PopART lowerings of the ops that move elements."""

import numpy as np

from poptransformer.backends.popart.lowering import lowering


@lowering("reshape")
def reshape(emitter, x, shape):
    return emitter.reshape(x, shape)


@lowering("transpose")
def transpose(emitter, x, axes):
    return emitter.transpose(x, axes)


@lowering("broadcast_to")
def broadcast_to(emitter, x, shape):
    return emitter.expand(x, shape)


@lowering("split")
def split(emitter, x, sizes, axis):
    return emitter.split(x, sizes, axis)


@lowering("concat")
def concat(emitter, *parts, axis):
    return emitter.concat(parts, axis)


@lowering("slice")
def slice_axis(emitter, x, start, stop, axis):
    return emitter.slice(x, start, stop, axis)


@lowering("gather")
def gather(emitter, table, indices):
    return emitter.gather(table, indices)


@lowering("dynamic_update")
def dynamic_update(emitter, x, update, start, axis):
    last = x.shape[axis] - update.shape[axis]
    start = emitter.reshape(emitter.minimum(emitter.maximum(start, 0), last), (1,))
    if x.dtype == bool:  # DynamicUpdate knows no bool
        whole, part = emitter.cast(x, np.int32), emitter.cast(update, np.int32)
        return emitter.cast(emitter.dynamic_update(whole, start, part, axis), bool)
    return emitter.dynamic_update(x, start, update, axis)

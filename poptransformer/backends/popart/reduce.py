"""PopART lowerings of the reductions."""

import numpy as np

from poptransformer.backends.popart.lowering import lowering


@lowering("reduce_sum")
def reduce_sum(emitter, x, axis):
    wide = emitter.widen(x) if x.dtype == np.float16 else x
    return emitter.cast(emitter.reduce("ReduceSum", wide, axis), x.dtype)


@lowering("reduce_max")
def reduce_max(emitter, x, axis):
    if x.dtype == bool:
        return reduce_any(emitter, x, axis)
    return emitter.reduce("ReduceMax", x, axis)


@lowering("reduce_any")
def reduce_any(emitter, x, axis):
    return emitter.greater(emitter.reduce("ReduceMax", emitter.cast(x, np.int32), axis), 0)


@lowering("argmax")
def argmax(emitter, x, axis):
    return emitter.argmax(emitter.cast(x, np.int32) if x.dtype == bool else x, axis)

"""PopART lowering of rms_norm, in float32."""

from poptransformer.backends.popart.lowering import lowering


@lowering("rms_norm")
def rms_norm(emitter, x, weight, eps):
    wide = emitter.widen(x)
    mean = emitter.reduce("ReduceMean", emitter.mul(wide, wide), keepdims=True)
    normed = emitter.cast(emitter.div(wide, emitter.unary("Sqrt", emitter.add(mean, eps))), x.dtype)
    return emitter.mul(normed, emitter.cast(weight, x.dtype))

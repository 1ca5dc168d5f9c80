"""PopART lowering of layer_norm: a group normalisation with one group, which keeps its statistics in float32."""

from poptransformer.backends.popart.lowering import lowering


@lowering("layer_norm")
def layer_norm(emitter, x, weight, bias, eps):
    weight, bias = emitter.cast(weight, x.dtype), emitter.cast(bias, x.dtype)
    flat = emitter.reshape(x, (-1, x.shape[-1]))
    return emitter.reshape(emitter.group_norm(flat, weight, bias, eps), x.shape)

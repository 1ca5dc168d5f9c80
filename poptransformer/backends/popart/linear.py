"""PopART lowerings of linear and matmul."""

from poptransformer.backends.popart.lowering import lowering


@lowering("matmul")
def matmul(emitter, x, y, out_dtype):
    return emitter.matmul(x, y, out_dtype)


@lowering("linear")
def linear(emitter, x, weight, bias, out_dtype):
    if weight.is_stored_transposed:
        matrix = emitter.stored(weight)
    else:
        matrix = emitter.transpose(weight, (1, 0))
    matrix = emitter.cast(matrix, x.dtype)
    y = emitter.matmul(emitter.reshape(x, (-1, x.shape[-1])), matrix, out_dtype)
    if bias is not None:
        y = emitter.add(y, emitter.cast(bias, out_dtype))
    return emitter.reshape(y, (*x.shape[:-1], matrix.shape[1]))

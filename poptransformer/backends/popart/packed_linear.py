"""PopART lowerings of packed_linear and packed_gather: codes stay packed in the IPU's memory, each use unpacks them.

A weight's initializers are `codes` [O, G, inputs of a group] uint8, two of a group's inputs in a byte for int4 (its halves: low
and high four bits), and `scales` and `minimums` [O, G, 1] float16. Unpacking is a Cast, Floor and arithmetic in float16, whose
rounding is far below that of the codes, and products are float16 with float32 sums. The codes of fp8 (e4m3) are unpacked to
the very numbers that they stand for, and the scales [O, 1, 1] float32 of the rows are factors of the products' results.

PopART would fold it all on the host while weights are constants; sessions with packed weights therefore have `constantWeights`
off.
"""

import numpy as np

from poptransformer.backends.popart.lowering import lowering

_HALF = np.dtype(np.float16)


@lowering("packed_linear")
def packed_linear(emitter, x, weight, bias, packing, out_dtype):
    matrix = _unpack(emitter, *_parts(emitter, weight, packing), packing)
    rows = emitter.cast(emitter.reshape(x, (-1, packing.in_features)), _HALF)
    y = emitter.matmul(rows, emitter.transpose(matrix, (1, 0)), np.float32 if packing.kind == "fp8" else out_dtype)
    if packing.kind == "fp8":
        scales = emitter.reshape(_parts(emitter, weight, packing)[1], (1, packing.out_features))
        y = emitter.cast(emitter.mul(y, scales), out_dtype)
    if bias is not None:
        y = emitter.add(y, emitter.cast(bias, out_dtype))
    return emitter.reshape(y, (*x.shape[:-1], packing.out_features))


@lowering("packed_gather")
def packed_gather(emitter, weight, indices, packing, out_dtype):
    indices = emitter.minimum(emitter.maximum(indices, 0), packing.out_features - 1)
    flat = emitter.reshape(indices, (-1,))
    parts = [part and emitter.gather(part, flat) for part in _parts(emitter, weight, packing)]
    rows = _unpack(emitter, *parts, packing)
    if packing.kind == "fp8":
        rows = emitter.mul(emitter.widen(rows), emitter.reshape(parts[1], (flat.shape[0], 1)))
    rows = emitter.cast(rows, out_dtype)
    return emitter.reshape(rows, (*indices.shape, packing.in_features))


def _parts(emitter, weight, packing):
    """codes, scales and minimums (None for int8) as initializers."""
    outs, groups, size = packing.out_features, packing.num_groups, _group_inputs(packing)

    def codes(packed):
        array = np.zeros((outs, groups * size), np.uint8)
        found = packing.split(packed)[0]
        array[:, : found.shape[1]] = found
        array = array.reshape(outs, groups, size)
        return array if packing.bits == 8 else array[:, :, : size // 2] | array[:, :, size // 2 :] << 4

    def numbers(place):
        return lambda packed: packing.split(packed)[place].reshape(outs, groups, 1)

    shape = (outs, groups, size * packing.bits // 8)
    return (
        emitter.derived(weight, "codes", shape, np.uint8, codes),
        emitter.derived(weight, "scales", (outs, groups, 1), packing.scale_dtype, numbers(1)),
        emitter.derived(weight, "minimums", (outs, groups, 1), _HALF, numbers(2)) if packing.bits == 4 else None,
    )


def _group_inputs(packing):
    return packing.units_per_group * 32


def _unpack(emitter, codes, scales, minimums, packing):
    """Rows [M, I] float16 of the matrix; those of fp8 without their scales."""
    numbers = emitter.cast(codes, _HALF)
    if packing.kind == "fp8":
        values = _from_float8(emitter, numbers)
    elif packing.bits == 8:
        values = emitter.mul(emitter.sub(numbers, 128), scales)
    else:
        high = emitter.unary("Floor", emitter.mul(numbers, 1 / 16))
        low = emitter.sub(numbers, emitter.mul(high, 16))
        values = emitter.add(emitter.mul(emitter.concat([low, high], 2), scales), minimums)
    values = emitter.reshape(values, (codes.shape[0], -1))
    return emitter.slice(values, 0, packing.in_features, 1)


def _from_float8(emitter, codes):
    """What codes 0 .. 255, given in float16, stand for in e4m3: sign, 4 bits of exponent, 3 of mantissa. Exact in float16."""

    def quotient(x, power):
        whole = emitter.unary("Floor", emitter.mul(x, 1 / power))
        return whole, emitter.sub(x, emitter.mul(whole, power))

    sign, rest = quotient(codes, 128)
    exponent, mantissa = quotient(rest, 8)
    is_normal = emitter.minimum(exponent, 1)  # numbers with an exponent of 0 have no leading one, and that of 1
    exponent = emitter.maximum(exponent, 1)
    factor = None  # 2 ** exponent, bit by bit
    for power in (8, 4, 2, 1):
        bit, exponent = quotient(exponent, power)
        term = emitter.add(emitter.mul(bit, 2**power - 1), 1)
        factor = term if factor is None else emitter.mul(factor, term)
    magnitude = emitter.mul(emitter.add(emitter.mul(is_normal, 8), mantissa), emitter.mul(factor, 2.0**-10))
    return emitter.mul(magnitude, emitter.sub(emitter.constant(_HALF.type(1)), emitter.mul(sign, 2)))

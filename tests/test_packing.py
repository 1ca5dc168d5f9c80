"""Packed weights: the layout byte by byte, the error of quantising, odd sizes, what cannot be packed."""

import numpy as np
import pytest

from poptransformer import UnsupportedError, UserError
from poptransformer.packing import GROUP_SIZES, Packing
from poptransformer.parallel import even_cut

EACH_KIND = pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
EACH_FORM = pytest.mark.parametrize(
    "kind, group_size", [*((kind, size) for kind in ("int8", "int4") for size in GROUP_SIZES), ("fp8", -1)]
)
SHAPES = [(1, 1), (3, 31), (16, 32), (17, 33), (40, 130), (5, 257), (1100, 20)]


def matrix(shape, seed=0):
    return (np.random.default_rng(seed).standard_normal(shape) * 0.05 + 0.01).astype(np.float32)


def usual_group(kind):
    return -1 if kind == "fp8" else 32


def decode(packing, packed, o, i):
    """One value, straight from the bytes as the module's docstring describes them."""
    block, unit, within = packed[o // 16], i // 32, i % 32
    quad, place = within // 4, within % 4
    if packing.kind != "int4":
        code = int(block[unit * 512 + quad * 64 + o % 16 * 4 + place])
    else:
        byte = int(block[unit * 256 + quad % 4 * 64 + o % 16 * 4 + place])
        code = byte & 15 if quad < 4 else byte >> 4
    units = -(-packing.in_features // 32)
    groups = 1 if packing.group_size == -1 else -(-packing.in_features // packing.group_size)
    group = 0 if packing.group_size == -1 else i // packing.group_size
    if packing.kind == "fp8":
        sign, exponent, fraction = 1 - 2 * (code >> 7), code >> 3 & 15, code & 7
        value = (8 + fraction) * 2.0 ** (exponent - 10) if exponent else fraction * 2.0**-9
        return sign * value * float(block[units * 512 :].copy().view(np.float32)[o % 16])
    numbers = block[units * (512 if packing.kind == "int8" else 256) :].copy().view(np.float16).astype(np.float64)
    scale = numbers[group * 16 + o % 16]
    return scale * (code - 128) if packing.kind == "int8" else scale * code + numbers[(groups + group) * 16 + o % 16]


@EACH_FORM
@pytest.mark.parametrize("shape", SHAPES)
def test_values_are_off_by_at_most_half_a_step(kind, group_size, shape):
    packing, weight = Packing(kind, group_size, *shape), matrix(shape)
    packed = packing.pack(weight)
    assert packed.shape == packing.shape and packed.dtype == np.uint8 and packing.block_bytes % 64 == 0
    back = packing.unpack(packed)
    assert back.shape == shape and back.dtype == np.float32
    size = shape[1] if group_size == -1 else group_size
    for begin in range(0, shape[1], size):  # a last short group has a scale of its own
        group, error = weight[:, begin : begin + size], np.abs(back - weight)[:, begin : begin + size]
        low, high = group.min(1), group.max(1)
        scale = np.abs(group).max(1) / 127 if kind != "int4" else (high - low) / 15
        if kind == "fp8":  # half a step of 3 bits of fraction, or of the subnormal numbers
            assert (error <= np.maximum(np.abs(group) * 2**-4, scale[:, None] * 127 / 448 * 2**-10) * (1 + 1e-6)).all()
            continue
        # Scales and minimums are float16: 11 bits.
        bound = 0.5 * scale * (1 + 2**-10) + (np.abs(low) * 2**-9 / 15 if kind == "int4" else 0) + 1e-7
        assert (error <= bound[:, None]).all()


@EACH_FORM
def test_bytes_are_as_described(kind, group_size):
    packing, weight = Packing(kind, group_size, 19, 141), matrix((19, 141))
    packed = packing.pack(weight)
    back = packing.unpack(packed)
    for o in (0, 3, 15, 16, 18):
        for i in (0, 5, 31, 32, 100, 127, 128, 140):
            assert back[o, i] == pytest.approx(decode(packing, packed, o, i), rel=1e-6, abs=1e-9)


@EACH_KIND
def test_known_values(kind):
    """Whole numbers that the codes reach exactly come back as they are."""
    rows = {"int8": [-127, 0, 1, 127, 64, -3], "int4": [-4, 0, 1, 11, 7, -3], "fp8": [-448, 0, 2**-9, 0.875 * 2**-6, 15, 240]}
    row = np.float32(rows[kind])
    packing = Packing(kind, usual_group(kind), 1, 6)
    np.testing.assert_array_equal(packing.unpack(packing.pack(row[None])), row[None])
    zeros = np.zeros((1, 6), np.float32)
    np.testing.assert_array_equal(packing.unpack(packing.pack(zeros)), zeros)


@EACH_KIND
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_any_float_is_packed_as_its_float32(kind, dtype):
    packing, weight = Packing(kind, usual_group(kind), 20, 70), matrix((20, 70)).astype(dtype)
    np.testing.assert_array_equal(packing.pack(weight), packing.pack(weight.astype(np.float32)))


def test_small_and_large_values_of_fp8():
    """Scales are float32: no size is too large or small, until rows count as zeros."""
    packing, line = Packing("fp8", -1, 1, 32), np.linspace(-1, 1, 32, dtype=np.float32)[None]
    for size in (1e-26, 1e-6, 1.0, 4e5, 3e38):
        error = np.abs(packing.unpack(packing.pack(line * np.float32(size))) - line * np.float32(size))
        assert (error <= np.maximum(np.abs(line) * 2**-4, 2**-10 / 448) * size * (1 + 1e-6)).all()
    assert not packing.unpack(packing.pack(line * np.float32(1e-29))).any()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_small_and_large_values(kind):
    """Below float16's normal numbers scales are coarse, but nothing is cut off; the largest scales hold 65504."""
    packing = Packing(kind, 32, 1, 32)
    for size in (1e-30, 1e-6, 3e-5, 60000.0, 4e5):
        weight = np.linspace(-size, size, 32, dtype=np.float32)[None]
        if kind == "int4" and size > 65504:
            with pytest.raises(UserError, match="too large for float16 scales"):
                packing.pack(weight)
            continue
        step = max(size * 2.002 / (254 if kind == "int8" else 15), 2.0**-24)
        assert np.abs(packing.unpack(packing.pack(weight)) - weight).max() <= step / 2 + size * 1e-3 + 2.0**-24


@EACH_KIND
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [(0, 0), (33, 70)])
def test_what_is_not_finite_is_refused(kind, bad, where):
    weight = matrix((34, 71))
    weight[where] = bad
    with pytest.raises(UserError, match="holds NaN or infinity.*set precision to fp32"):
        Packing(kind, usual_group(kind), 34, 71).pack(weight)


def test_unknown_kinds_and_groups_are_refused():
    with pytest.raises(UnsupportedError, match="group_size=32 is not supported for fp8, which has one scale a row"):
        Packing("fp8", 32, 1, 1)
    with pytest.raises(UnsupportedError, match="kind 'int3'.*int8, int4, fp8"):
        Packing("int3", 32, 1, 1)
    with pytest.raises(UnsupportedError, match="group_size=48.*32, 64, 128, -1"):
        Packing("int8", 48, 1, 1)


@EACH_KIND
def test_random_weights_have_the_deviation_of_float_ones(kind):
    packing = Packing(kind, usual_group(kind), 300, 500)
    drawn = packing.draw(3)
    values = packing.unpack(drawn)
    assert 0.018 < values.std() < 0.022 and abs(values.mean()) < 1e-3
    np.testing.assert_array_equal(drawn, packing.draw(3))
    assert (drawn != packing.draw(4)).any()


@pytest.mark.parametrize("kind, group_size", [("fp8", -1), ("int8", -1), ("int8", 32), ("int4", 64)])
@pytest.mark.parametrize("axis", [0, 1])
def test_parts_for_ranks(kind, group_size, axis):
    """Rows or columns of the whole, codes and scales as they are, zeros where a rank has less."""
    shape = (37, 200)
    packing, weight = Packing(kind, group_size, *shape), matrix(shape)
    packed = packing.pack(weight)
    cut = even_cut(axis, shape[axis], 3, 64 if axis else 1)
    assert packing.can_take(cut)
    whole = packing.unpack(packed)
    for rank in range(3):
        wanted = cut.take(whole, rank)
        local = Packing(kind, group_size, *wanted.shape)
        part = packing.take(packed, cut, rank)
        assert part.shape == local.shape
        back = local.unpack(part)
        if kind == "int4" and axis == 1:  # what fills a group up has its minimum there; the inputs it meets are zeros
            back[:, cut.indices(rank) < 0] = 0
        np.testing.assert_array_equal(back, wanted)


def test_bits_a_weight():
    assert Packing("fp8", -1, 4096, 4096).shape == (256, 16 * 4096 + 64)
    assert 8 * np.prod(Packing("int8", 32, 4096, 4096).shape) / 4096**2 == 8.5
    assert 8 * np.prod(Packing("int4", 32, 4096, 4096).shape) / 4096**2 == 5
    assert 8 * np.prod(Packing("int4", 128, 4096, 4096).shape) / 4096**2 == 4.25

"""packed_linear and packed_gather: products with, and rows of, packed weights."""

import numpy as np
import pytest
from run_op import FLOATS, normal, reference, refusal, run_op, xla
from tolerance import assert_close

from poptransformer import ops
from poptransformer.packing import GROUP_SIZES, Packing

f32, i32, u8 = np.float32, np.int32, np.uint8
CASES = {
    f"{kind} {group_size} {shape}": Packing(kind, group_size, *shape)
    for kind in ("int8", "int4")
    for group_size in GROUP_SIZES
    for shape in ((1, 1), (17, 33), (31, 130))
} | {f"fp8 {shape}": Packing("fp8", -1, *shape) for shape in ((1, 1), (17, 33), (31, 130))}


def packed(packing, seed=0):
    return packing.pack(normal((packing.out_features, packing.in_features), f32, seed))


def test_reference_is_a_product_with_the_unpacked_weight():
    packing = Packing("int4", 32, 19, 70)
    x, weight, bias = normal((2, 3, 70), f32), packed(packing), normal(19, f32)
    y, plain = run_op(
        reference(),
        lambda x, w, b: [ops.packed_linear(x, w, packing, b), ops.packed_linear(x, w, packing)],
        x=x,
        w=weight,
        b=bias,
    )
    assert_close(plain, x @ packing.unpack(weight).T, rtol=1e-5, atol=1e-5)
    assert_close(y, plain + bias)


@pytest.mark.parametrize("kind, group_size", [("int8", 64), ("fp8", -1)])
def test_gathered_rows_are_those_of_the_unpacked_weight(kind, group_size):
    packing = Packing(kind, group_size, 40, 70)
    weight, ids = packed(packing), np.array([[0, 39, 16], [15, 15, 31]], i32)
    for engine in (reference(), xla(), xla(custom_ops=True)):
        rows = run_op(engine, lambda w, i: ops.packed_gather(w, i, packing, f32), w=weight, i=ids)
        assert_close(rows, packing.unpack(weight)[ids])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_plain_lowering_equals_reference(dtype, num_rows):
    kind = FLOATS[dtype]
    arrays = {"x 130": normal((num_rows, 130), kind), "x 33": normal((num_rows, 33), kind), "x 1": normal((num_rows, 1), kind)}
    arrays |= {name: packed(packing, seed) for seed, (name, packing) in enumerate(CASES.items())}

    def build(**values):
        return {
            name: ops.packed_linear(values[f"x {packing.in_features}"], values[name], packing, out_dtype=f32)
            for name, packing in CASES.items()
        } | {
            f"row {name}": ops.packed_linear(values[f"x {packing.in_features}"], values[name], packing)
            for name, packing in list(CASES.items())[::5]
        }

    wanted, actual = (run_op(engine, build, **arrays) for engine in (reference(), xla()))
    # With several rows XLA multiplies in the dtype of x, to which the weight is rounded.
    rounding = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}[dtype] if num_rows > 1 else 1e-5
    for name in wanted:
        by_result = {"bfloat16": 1e-2, "float16": 1e-3, "float32": 0}[wanted[name].dtype.name]
        assert_close(
            actual[name], wanted[name], rtol=rounding + by_result, atol=(rounding + by_result) * np.abs(wanted[name]).max()
        )


def test_wrong_arguments():
    packing = Packing("int8", 32, 5, 40)
    x, w = ((2, 40), f32), (packing.shape, u8)

    def product(*values):
        return ops.packed_linear(*values[:2], packing, *values[2:])

    assert "x must be [..., 40]" in refusal(product, ((2, 9), f32), w)
    assert "the weight must be uint8 [1, 1088]" in refusal(product, x, ((1, 1024), u8))
    assert "bias must be [5]" in refusal(product, x, w, ((4,), f32))
    assert "wants a floating dtype" in refusal(product, ((2, 40), i32), w)
    assert "indices must be int32" in refusal(lambda w, i: ops.packed_gather(w, i, packing, f32), w, ((3,), f32))

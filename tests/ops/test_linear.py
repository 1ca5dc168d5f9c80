"""linear and matmul: products with float32 sums."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_op import FLOATS, SIZES, hypothesis_settings, normal, reference, refusal, run_op, xla
from tolerance import assert_close

from poptransformer import ops

f32, i32, bf16 = np.float32, np.int32, FLOATS["bfloat16"]


def test_reference_equals_torch():
    # torch 2.13.0: F.linear(torch.tensor([[1., 2.], [3., -1.]]), torch.tensor([[.5, 1.], [2., -1.], [0., 3.]]),
    # torch.tensor([.25, 0., -1.])) -> [[2.75, 0, 5], [0.75, 7, -4]]
    x, weight = np.array([[1, 2], [3, -1]], f32), np.array([[0.5, 1], [2, -1], [0, 3]], f32)
    bias = np.array([0.25, 0, -1], f32)
    wanted = np.array([[2.75, 0, 5], [0.75, 7, -4]], f32)

    def build(x, weight, bias):
        return ops.linear(x, weight, bias), ops.linear(x, weight) + bias, ops.matmul(x, ops.transpose(weight, (1, 0))) + bias

    for engine in (reference(), xla()):
        for result in run_op(engine, build, x=x, weight=weight, bias=bias):
            assert_close(result, wanted)


@pytest.mark.parametrize("dtype", FLOATS)
def test_lowerings_equal_references(dtype):
    """Every size as in_features, batched and not; results in the operands' dtype and in float32."""
    kind, arrays = FLOATS[dtype], {}
    for size in SIZES:
        arrays |= {f"x{size}": normal((2, 3, size), kind, seed=size), f"w{size}": normal((17, size), kind, size + 1)}
        arrays[f"y{size}"] = normal((2, size, 5), kind, seed=size + 2)
    arrays["bias"] = normal(17, kind)

    def build(bias, **values):
        results = {}
        for size in SIZES:
            x, w, y = (values[f"{letter}{size}"] for letter in "xwy")
            results[f"linear {size}"] = ops.linear(x, w, bias)
            results[f"wide {size}"] = ops.linear(x, w, out_dtype=f32)
            results[f"matmul {size}"] = ops.matmul(x, y)
            results[f"wide matmul {size}"] = ops.matmul(x, y, out_dtype=f32)
        return results

    wanted, actual = (run_op(engine, build, **arrays) for engine in (reference(), xla()))
    for key in wanted:
        # sums of 129 products of order 1, in another order, may cancel
        atol = 2e-5 if actual[key].dtype == f32 else None
        assert_close(actual[key], wanted[key], atol=atol)
    wide = np.einsum("bti,oi->bto", *(arrays[key].astype(np.float64) for key in ("x129", "w129")))
    assert_close(wanted["wide 129"], wide.astype(f32), atol=2e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_of_16_bits_are_float32(dtype):
    """4096 products of 1: a 16-bit sum would stop at 256 or 2048. The bias is added before the result is rounded."""
    kind = FLOATS[dtype]
    x, weight, bias = np.ones((1, 4096), kind), np.ones((1, 4096), kind), np.array([0.25], kind)
    for engine in (reference(), xla()):
        result = run_op(
            engine, lambda x, weight, bias: ops.linear(x, weight, bias, out_dtype=f32), x=x, weight=weight, bias=bias
        )
        assert result.tolist() == [[4096.25]]


def test_weights_may_be_narrower_than_activations():
    x, weight = normal((3, 17)), normal((5, 17), bf16, seed=1)
    results = [run_op(engine, ops.linear, x=x, weight=weight) for engine in (reference(), xla())]
    for result in results:
        assert_close(result, x @ weight.astype(f32).T, atol=2e-6)


@hypothesis_settings(6)
@given(batch=st.lists(st.sampled_from([1, 2, 3]), max_size=2), sizes=st.tuples(*[st.sampled_from([1, 3, 5, 17])] * 3))
def test_leading_axes_broadcast(batch, sizes):
    t, i, o = sizes
    x, y, weight = normal((*batch, t, i)), normal((i, o), seed=1), normal((o, i), seed=2)
    for engine in (reference(), xla()):
        product, flat = run_op(engine, lambda x, y, weight: (ops.matmul(x, y), ops.linear(x, weight)), x=x, y=y, weight=weight)
        assert_close(product, np.einsum("...ti,io->...to", x, y), atol=1e-5)
        assert_close(flat, np.einsum("...ti,oi->...to", x, weight), atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_do_not_mix(dtype):
    x, weight = normal((7, 33), FLOATS[dtype]), normal((5, 33), FLOATS[dtype], seed=1)
    order = np.array([3, 0, 6, 5, 1, 2, 4])
    for engine in (reference(), xla()):
        straight, permuted = (run_op(engine, ops.linear, x=rows, weight=weight) for rows in (x, x[order]))
        assert_close(permuted, straight[order])


@pytest.mark.parametrize(
    "build, specs, message",
    [
        (
            ops.linear,
            [((2, 3), f32), ((5, 4), f32)],
            "linear(float32[2, 3], float32[5, 4], none): x has 3 features, the weight",
        ),
        (ops.linear, [((2, 3), f32), ((5, 3, 1), f32)], "wants x [..., in_features] and weight [out_features, in_features]"),
        (ops.linear, [((), f32), ((5, 3), f32)], "wants x [..., in_features]"),
        (ops.linear, [((2, 3), f32), ((5, 3), f32), ((3,), f32)], "bias must be [5]"),
        (ops.linear, [((2, 3), i32), ((5, 3), i32)], "linear(int32[2, 3], int32[5, 3], none): wants a floating dtype"),
        (ops.matmul, [((2, 3), f32), ((4, 5), f32)], "matmul(float32[2, 3], float32[4, 5]): inner sizes differ: 3 and 4"),
        (ops.matmul, [((2, 3), f32), ((3,), f32)], "wants at least two axes each"),
        (ops.matmul, [((2, 3), f32), ((3, 4), bf16)], "operands differ in dtype"),
        (ops.matmul, [((2, 2, 3), f32), ((3, 3, 4), f32)], "shapes do not broadcast"),
        (ops.matmul, [((2, 3), i32), ((3, 4), i32)], "wants a floating dtype"),
    ],
)
def test_what_is_refused(build, specs, message):
    assert message in refusal(build, *specs)

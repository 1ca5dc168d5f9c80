"""reduce_sum, reduce_max, reduce_any and argmax."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_op import FLOATS, SIZES, hypothesis_settings, normal, reference, refusal, run_op, xla
from tolerance import assert_close

from poptransformer import ops

f32, i32 = np.float32, np.int32


def reductions(**values):
    names = ("reduce_sum", "reduce_max", "argmax")
    return {
        f"{name} {key} {axis}": getattr(ops, name)(x, axis) for key, x in values.items() for name in names for axis in (0, -1)
    }


@pytest.mark.parametrize("dtype", [*FLOATS, "int32"])
def test_lowerings_equal_references(dtype):
    arrays = {f"x{size}": normal((3, size), seed=size, scale=5).astype(FLOATS.get(dtype, i32)) for size in SIZES}
    wanted, actual = (run_op(engine, reductions, **arrays) for engine in (reference(), xla()))
    for key in wanted:
        # sums of up to 129 numbers around 5, in another order, may cancel
        rtol, atol = (None, 1e-4) if dtype == "float32" and key.startswith("reduce_sum") else (None, None)
        assert_close(actual[key], wanted[key], rtol, atol)
    x = arrays["x17"].astype(np.float64)
    assert_close(wanted["reduce_sum x17 0"], (x[0] + x[1] + x[2]).astype(arrays["x17"].dtype), atol=2e-2)
    assert wanted["argmax x17 -1"].tolist() == [row.tolist().index(row.max()) for row in arrays["x17"]]
    assert wanted["argmax x17 0"].dtype == i32


def test_sums_of_16_bits_are_added_up_in_float32():
    """3000 times 1.0078125 is 3023.4; added up in bfloat16 the sum would stop at 256, where adding 1 rounds to nothing."""
    x = np.full((2, 3000), 1.01, FLOATS["bfloat16"])
    for engine in (reference(), xla()):
        assert run_op(engine, ops.reduce_sum, x=x).astype(f32).tolist() == [3024, 3024]


def test_small_integers_keep_their_dtype():
    x = np.array([[100, 100, 3], [-128, -1, 0]], np.int8)
    for engine in (reference(), xla()):
        assert_close(run_op(engine, ops.reduce_sum, x=x), np.array([-53, 127], np.int8))  # wraps around


def test_bool_and_special_numbers():
    x = np.array([[-np.inf, -3, -np.inf], [-np.inf, -np.inf, -np.inf], [2, 2, 1]], f32)

    def build(x):
        return {
            "any": ops.reduce_any(ops.greater(x, 0)),
            "any down": ops.reduce_any(ops.greater(x, 0), axis=0),
            "max": ops.reduce_max(x),
            "argmax": ops.argmax(x),
            "max of bool": ops.reduce_max(ops.greater(x, 0)),
        }

    for engine in (reference(), xla()):
        results = run_op(engine, build, x=x)
        assert results["any"].tolist() == results["max of bool"].tolist() == [False, False, True]
        assert results["any down"].tolist() == [True, True, True]
        assert results["max"].tolist() == [-3, -np.inf, 2]
        assert results["argmax"].tolist() == [1, 0, 0], "the first of equals"


@hypothesis_settings(6)
@given(st.data())
def test_any_axis_of_any_shape(data):
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 17]), min_size=1, max_size=4), "shape")
    axis = data.draw(st.integers(-len(shape), len(shape) - 1), "axis")
    x = normal(shape, seed=3).round(1)
    for engine in (reference(), xla()):
        total, top, at = run_op(engine, lambda x: [ops.reduce_sum(x, axis), ops.reduce_max(x, axis), ops.argmax(x, axis)], x=x)
        assert_close(total, np.add.reduce(x, axis), atol=1e-5)
        assert_close(top, np.maximum.reduce(x, axis))
        assert_close(np.take_along_axis(x, np.expand_dims(at, axis), axis).squeeze(axis), top)


@pytest.mark.parametrize(
    "build, specs, message",
    [
        (lambda x: ops.reduce_sum(x, 2), [((2, 3), f32)], "reduce_sum(float32[2, 3]): has no axis 2"),
        (lambda x: ops.reduce_max(x, -3), [((2, 3), f32)], "reduce_max(float32[2, 3]): has no axis -3"),
        (ops.argmax, [((), f32)], "argmax(float32[]): has no axis -1"),
        (ops.reduce_max, [((2, 0), f32)], "reduce_max(float32[2, 0]): cannot reduce an axis without elements"),
        (ops.reduce_any, [((2, 3), f32)], "reduce_any(float32[2, 3]): wants bool"),
        (ops.reduce_sum, [((2, 3), bool)], "reduce_sum(bool[2, 3]): wants numbers, not bool; cast to int32 to count"),
    ],
)
def test_what_is_refused(build, specs, message):
    assert message in refusal(build, *specs)

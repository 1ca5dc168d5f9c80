"""layer_norm."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_op import FLOATS, SIZES, hypothesis_settings, normal, reference, refusal, run_op, xla
from tolerance import assert_close

from poptransformer import ops

f32 = np.float32


def test_reference_equals_torch():
    # torch 2.13.0: F.layer_norm(torch.tensor([[1., 2., 4.], [-3., 0., 3.]]), (3,), torch.tensor([1., 2., .5]),
    # torch.tensor([0., .1, -1.]), 1e-2)
    x, weight, bias = np.array([[1, 2, 4], [-3, 0, 3]], f32), np.array([1, 2, 0.5], f32), np.array([0, 0.1, -1], f32)
    wanted = np.array([[-1.06562523, -0.43281261, -0.33398423], [-1.22372552, 0.1, -0.38813724]], f32)
    for engine in (reference(), xla()):
        result = run_op(engine, lambda x, w, b: ops.layer_norm(x, w, b, eps=1e-2), x=x, w=weight, b=bias)
        assert_close(result, wanted)


@pytest.mark.parametrize("dtype", FLOATS)
def test_lowerings_equal_references(dtype):
    kind, arrays = FLOATS[dtype], {}
    for size in SIZES:
        arrays |= {f"x{size}": normal((2, 3, size), kind, seed=size, scale=3) + kind.type(2)}
        arrays |= {f"w{size}": normal(size, kind, seed=size + 1), f"b{size}": normal(size, kind, seed=size + 2)}

    def build(**values):
        return {str(n): ops.layer_norm(values[f"x{n}"], values[f"w{n}"], values[f"b{n}"], 1e-5) for n in SIZES}

    wanted, actual = (run_op(engine, build, **arrays) for engine in (reference(), xla()))
    for key in wanted:
        assert_close(actual[key], wanted[key])
        x, w, b = (arrays[f"{letter}{key}"].astype(np.float64) for letter in "xwb")
        exact = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * w + b
        assert_close(wanted[key], exact.astype(kind), atol=5e-6 if dtype == "float32" else None)  # x - mean cancels
    assert_close(actual["1"], np.broadcast_to(arrays["b1"], (2, 3, 1)))  # one feature is its own mean


def test_statistics_of_16_bits_are_float32():
    """Squares up to 1e6 and a sum of 4096 terms: float16 has neither."""
    x = np.where(np.arange(4096) % 2 == 0, 1000, -1000).astype(np.float16)[None]
    ones, zeros = np.ones(4096, np.float16), np.zeros(4096, np.float16)
    for engine in (reference(), xla()):
        result = run_op(engine, lambda x, w, b: ops.layer_norm(x, w, b, 1e-5), x=x, w=ones, b=zeros)
        assert_close(result, np.sign(x))


def test_mean_zero_variance_one_and_shift_free():
    x = normal((5, 129), scale=4)

    def build(x, w, b):
        return ops.layer_norm(x, w, b, 1e-8), ops.layer_norm(x * 3 + 7, w, b, 1e-8)

    for engine in (reference(), xla()):
        straight, moved = run_op(engine, build, x=x, w=np.ones(129, f32), b=np.zeros(129, f32))
        assert_close(straight.mean(-1), np.zeros(5, f32))
        assert_close(straight.var(-1), np.ones(5, f32))
        assert_close(moved, straight, atol=5e-6)  # 7 is added and taken away again


@hypothesis_settings(5)
@given(shape=st.lists(st.sampled_from([1, 2, 3, 17]), min_size=1, max_size=4))
def test_rows_do_not_mix(shape):
    x, weight, bias = normal(shape), normal(shape[-1:], seed=1), normal(shape[-1:], seed=2)
    flipped = x[::-1] if len(shape) > 1 else x
    for engine in (reference(), xla()):
        straight, other = run_op(
            engine, lambda x, y, w, b: [ops.layer_norm(z, w, b, 1e-5) for z in (x, y)], x=x, y=flipped, w=weight, b=bias
        )
        assert_close(other[::-1] if len(shape) > 1 else other, straight)


@pytest.mark.parametrize(
    "specs, message",
    [
        ([((2, 3), f32), ((4,), f32), ((3,), f32)], "layer_norm(float32[2, 3], float32[4], float32[3]): weight and bias must"),
        ([((2, 3), f32), ((3,), f32), ((1,), f32)], "weight and bias must be [3]"),
        ([((), f32), ((3,), f32), ((3,), f32)], "wants a last axis"),
        ([((3,), np.int32), ((3,), f32), ((3,), f32)], "wants a floating dtype"),
    ],
)
def test_what_is_refused(specs, message):
    assert message in refusal(lambda *values: ops.layer_norm(*values, 1e-5), *specs)

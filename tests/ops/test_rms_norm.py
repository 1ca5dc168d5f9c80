"""rms_norm."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_op import FLOATS, SIZES, hypothesis_settings, normal, reference, refusal, run_op, xla
from tolerance import assert_close

from poptransformer import ops

f32 = np.float32


def test_equals_torch():
    # torch 2.13.0: F.rms_norm(torch.tensor([[1., 2., 4.], [-3., 0., 3.]]), (3,), torch.tensor([1., 2., .5]), 1e-2)
    x, weight = np.array([[1, 2, 4], [-3, 0, 3]], f32), np.array([1, 2, 0.5], f32)
    wanted = np.array([[0.37769479, 1.51077914, 0.75538957], [-1.22372556, 0.0, 0.61186278]], f32)
    for engine in (reference(), xla()):
        assert_close(run_op(engine, lambda x, w: ops.rms_norm(x, w, eps=1e-2), x=x, w=weight), wanted)


@pytest.mark.parametrize("dtype", FLOATS)
def test_lowering_equals_reference(dtype):
    kind, arrays = FLOATS[dtype], {}
    for size in SIZES:
        arrays |= {f"x{size}": normal((2, 3, size), kind, seed=size, scale=3), f"w{size}": normal(size, kind, seed=size + 1)}

    def build(**values):
        return {str(n): ops.rms_norm(values[f"x{n}"], values[f"w{n}"], 1e-5) for n in SIZES}

    wanted, actual = (run_op(engine, build, **arrays) for engine in (reference(), xla()))
    for key in wanted:
        assert_close(actual[key], wanted[key])
        x, w = (arrays[f"{letter}{key}"].astype(np.float64) for letter in "xw")
        assert_close(wanted[key], (x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w).astype(kind))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_reference_rounds_before_the_weight(dtype):
    """As transformers does: the normalised value is one of the dtype's own, and so is the result."""
    kind = FLOATS[dtype]
    x, weight = normal((7, 33), kind), normal(33, kind, seed=1)
    result = run_op(reference(), lambda x, w: ops.rms_norm(x, w, 1e-6), x=x, w=weight)
    wide = x.astype(f32)
    normed = (wide / np.sqrt((wide**2).mean(-1, keepdims=True) + f32(1e-6))).astype(kind)
    assert_close(result, normed * weight, rtol=0, atol=0)
    once = (wide / np.sqrt((wide**2).mean(-1, keepdims=True) + f32(1e-6)) * weight.astype(f32)).astype(kind)
    assert (result != once).any()


def test_mean_of_16_bits_is_float32():
    """Squares up to 1e6 and a sum of 4096 terms: float16 has neither. A weight of float32 keeps the dtype of x."""
    x = np.where(np.arange(4096) % 2 == 0, 1000, -1000).astype(np.float16)[None]
    for engine in (reference(), xla()):
        result = run_op(engine, lambda x, w: ops.rms_norm(x, w, 1e-5), x=x, w=np.ones(4096, f32))
        assert_close(result, np.sign(x))


def test_root_mean_square_is_one_and_scale_free():
    x = normal((5, 129), scale=4)
    for engine in (reference(), xla()):
        straight, larger = run_op(
            engine, lambda x, w: (ops.rms_norm(x, w, 1e-9), ops.rms_norm(x * 7, w, 1e-9)), x=x, w=np.ones(129, f32)
        )
        assert_close(np.sqrt((straight**2).mean(-1)), np.ones(5, f32))
        assert_close(larger, straight)
        assert not run_op(engine, lambda x, w: ops.rms_norm(x, w, 1e-9), x=x * 0, w=np.ones(129, f32)).any()


@hypothesis_settings(5)
@given(shape=st.lists(st.sampled_from([1, 2, 3, 17]), min_size=1, max_size=4))
def test_rows_do_not_mix(shape):
    x, weight = normal(shape), normal(shape[-1:], seed=1)
    flipped = x[::-1] if len(shape) > 1 else x
    for engine in (reference(), xla()):
        straight, other = run_op(engine, lambda x, y, w: [ops.rms_norm(z, w, 1e-5) for z in (x, y)], x=x, y=flipped, w=weight)
        assert_close(other[::-1] if len(shape) > 1 else other, straight)


@pytest.mark.parametrize(
    "specs, message",
    [
        ([((2, 3), f32), ((4,), f32)], "rms_norm(float32[2, 3], float32[4]): weight must be [3]"),
        ([((2, 3), f32), ((1, 3), f32)], "weight must be [3]"),
        ([((), f32), ((3,), f32)], "wants a last axis with elements"),
        ([((2, 0), f32), ((0,), f32)], "wants a last axis with elements"),
        ([((3,), np.int32), ((3,), f32)], "wants a floating dtype"),
        ([((3,), f32), ((3,), np.int32)], "wants a floating dtype"),
    ],
)
def test_what_is_refused(specs, message):
    assert message in refusal(lambda *values: ops.rms_norm(*values, 1e-5), *specs)

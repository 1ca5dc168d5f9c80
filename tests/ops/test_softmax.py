"""softmax and token_log_prob."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_op import FLOATS, SIZES, hypothesis_settings, normal, reference, refusal, run_op, xla
from tolerance import assert_close

from poptransformer import ops

f32, i32 = np.float32, np.int32


def test_references_equal_torch():
    # torch 2.13.0: F.softmax(x, -1) and F.log_softmax(x, -1) of x = torch.tensor([[1., 2., 4.], [-1000., 0., 1000.]])
    x = np.array([[1, 2, 4], [-1000, 0, 1000]], f32)
    softmax = np.array([[0.04201007, 0.1141952, 0.84379473], [0, 0, 1]], f32)
    log_softmax = np.array([[-3.16984602, -2.16984602, -0.16984602], [-2000, -1000, 0]], f32)

    def build(x, ids):
        return ops.softmax(x), *(
            ops.token_log_prob(x, part) for part in (ops.reshape(i, (2,)) for i in ops.split(ids, (1, 1, 1)))
        )

    ids = np.array([[0, 1, 2]] * 2, i32)
    for engine in (reference(), xla()):
        probability, *columns = run_op(engine, build, x=x, ids=ids)
        assert_close(probability, softmax)
        assert_close(np.stack(columns, -1), log_softmax)


@pytest.mark.parametrize("dtype", FLOATS)
def test_lowerings_equal_references(dtype):
    arrays = {f"x{size}": normal((3, 2, size), FLOATS[dtype], seed=size, scale=5) for size in SIZES}
    arrays |= {f"i{size}": np.random.default_rng(size).integers(0, size, (3, 2)).astype(i32) for size in SIZES}

    def build(**values):
        logits = {size: ops.cast(values[f"x{size}"], f32) for size in SIZES}
        return {f"softmax {size}": ops.softmax(values[f"x{size}"]) for size in SIZES} | {
            f"token_log_prob {size}": ops.token_log_prob(logits[size], values[f"i{size}"]) for size in SIZES
        }

    wanted, actual = (run_op(engine, build, **arrays) for engine in (reference(), xla()))
    for key in wanted:
        assert_close(actual[key], wanted[key])
    for size in SIZES:
        probability, x = actual[f"softmax {size}"].astype(np.float64), arrays[f"x{size}"].astype(np.float64)
        assert_close(probability.sum(-1), np.ones((3, 2)), rtol=2e-2 if dtype == "bfloat16" else 1e-2)  # rounded terms
        if dtype == "float32":
            assert_close(probability.sum(-1), np.ones((3, 2)), rtol=1e-6)
        chosen = np.take_along_axis(probability, arrays[f"i{size}"][..., None], -1)[..., 0]
        tolerance = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 2e-2}[dtype]  # the logarithm of a rounded number
        is_large = chosen > 1e-2
        assert_close(actual[f"token_log_prob {size}"][is_large].astype(float), np.log(chosen[is_large]), atol=tolerance)
        exact = np.exp(x - x.max(-1, keepdims=True))
        assert_close(wanted[f"softmax {size}"], (exact / exact.sum(-1, keepdims=True)).astype(FLOATS[dtype]))


def test_masked_and_large_logits():
    x = np.array([[-np.inf, 0, -np.inf, 0], [1e38, -1e38, 1e38, -np.inf], [-7e4, -7e4, -np.inf, -np.inf]], f32)

    def build(x, ids):
        return ops.softmax(x), ops.token_log_prob(x, ids)

    for engine in (reference(), xla()):
        probability, logprob = run_op(engine, build, x=x, ids=np.array([1, 3, 0], i32))
        assert_close(probability, np.array([[0, 0.5, 0, 0.5], [0.5, 0, 0.5, 0], [0.5, 0.5, 0, 0]], f32))
        assert_close(logprob, np.array([-np.log(2), -np.inf, -np.log(2)], f32))


def test_a_constant_changes_nothing():
    """softmax(x + c) = softmax(x); so too for float16, whose differences are taken in float32."""
    x = np.array([[0, 0.5, 3, -2]], np.float16)
    wide = np.array([[2048, 2050, 2060, 2046]], np.float16)
    for engine in (reference(), xla()):
        first, second, third = run_op(engine, lambda x, y: (ops.softmax(x), ops.softmax(x + 4), ops.softmax(y)), x=x, y=wide)
        assert_close(second, first)
        exact = np.exp(wide.astype(f32) - 2060)
        assert_close(third, (exact / exact.sum()).astype(np.float16))


@hypothesis_settings(5)
@given(shape=st.lists(st.sampled_from([1, 2, 3, 17]), min_size=1, max_size=4))
def test_rows_do_not_mix(shape):
    x = normal(shape, scale=3)
    flipped = x[::-1] if len(shape) > 1 else x
    ids = np.zeros(shape[:-1], i32)

    def build(x, y, ids):
        return ops.softmax(x), ops.softmax(y), ops.token_log_prob(x, ids)

    for engine in (reference(), xla()):
        straight, other, logprob = run_op(engine, build, x=x, y=flipped, ids=ids)
        assert_close(other[::-1] if len(shape) > 1 else other, straight)
        assert_close(np.exp(logprob), straight[..., 0])


@pytest.mark.parametrize(
    "build, specs, message",
    [
        (ops.softmax, [((), f32)], "softmax(float32[]): wants a last axis with elements"),
        (ops.softmax, [((3, 0), f32)], "softmax(float32[3, 0]): wants a last axis with elements"),
        (ops.softmax, [((3,), i32)], "softmax(int32[3]): wants a floating dtype"),
        (ops.token_log_prob, [((2, 5), f32), ((3,), i32)], "token_log_prob(float32[2, 5], int32[3]): wants token ids [2]"),
        (ops.token_log_prob, [((2, 5), np.float16), ((2,), i32)], "logits must be float32"),
        (ops.token_log_prob, [((2, 5), f32), ((2,), np.int64)], "token ids must be int32"),
    ],
)
def test_what_is_refused(build, specs, message):
    assert message in refusal(build, *specs)

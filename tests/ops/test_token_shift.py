"""token_shift."""

import numpy as np
import pytest
from run_op import FLOATS, compiled, normal, reference, refusal, run_op, xla
from tolerance import assert_close

from poptransformer import ops

f32, i32 = np.float32, np.int32
NAMES = ("x", "shift_state", "cache_len", "num_tokens")


def shift(**values):
    mixes = [value for name, value in values.items() if name.startswith("mix")]
    return ops.token_shift(*(values[name] for name in NAMES), *mixes)


def problem(B=2, T=3, D=5, *, cache_len, num_tokens, dtype=f32, num_mixes=2):
    arrays = {
        "x": normal((B, T, D), dtype), "shift_state": normal((B, D), seed=1),
        "cache_len": np.array(cache_len, i32), "num_tokens": np.array(num_tokens, i32),
    }  # fmt: skip
    return arrays | {f"mix_{i}": normal((D,), dtype, seed=2 + i) for i in range(num_mixes)}


@pytest.mark.parametrize("make_engine", [reference, xla])
def test_known_numbers(make_engine):
    """By hand: quarters of the new token, three quarters of the one before."""
    arrays = {
        "x": np.array([[[4, 8], [12, 0]], [[4, 8], [12, 0]]], f32), "shift_state": np.array([[100, 200], [-4, 4]], f32),
        "cache_len": np.array([0, 7], i32), "num_tokens": np.array([2, 1], i32), "mix": np.array([0.25, 1], f32),
    }  # fmt: skip
    mixed, state = run_op(make_engine(), shift, **arrays)
    assert_close(mixed, np.array([[[1, 8], [6, 0]], [[-2, 8], [6, 0]]], f32), rtol=0, atol=0)
    assert_close(state, np.array([[12, 0], [4, 8]], f32), rtol=0, atol=0)


@pytest.mark.parametrize(
    "dtype, T, D", [("float32", 1, 129), ("float32", 7, 17), ("bfloat16", 1, 3), ("bfloat16", 2, 127), ("float16", 3, 1)]
)
def test_lowering_equals_the_reference(dtype, T, D):
    """Rows that begin, go on, have padding and rest."""
    arrays = problem(4, T, D, cache_len=[0, 3, 1, 2], num_tokens=[T, T, (T + 1) // 2, 0], dtype=FLOATS[dtype])
    wanted, actual = run_op(reference(), shift, **arrays), run_op(xla(), shift, **arrays)
    for result, expected in zip(actual[:-1], wanted[:-1], strict=True):
        assert result.dtype == FLOATS[dtype]
        assert_close(result, expected)
    assert_close(actual[-1], wanted[-1], rtol=0, atol=0)


@pytest.mark.parametrize("make_engine", [reference, xla])
def test_properties(make_engine):
    arrays = problem(3, 6, 5, cache_len=[0, 4, 0], num_tokens=[6, 5, 0])
    run = compiled(make_engine(), shift, **arrays)
    first, _, state = run(**arrays).values()

    # mixes of 1 and 0 are the token and the one before it
    same, before, _ = run(**arrays | {"mix_0": np.ones(5, f32), "mix_1": np.zeros(5, f32)}).values()
    assert_close(same, arrays["x"], rtol=0, atol=0)
    assert_close(before[:, 1:], arrays["x"][:, :-1], rtol=0, atol=0)
    assert_close(before[:, 0], np.where([[0], [1], [0]], arrays["shift_state"], 0).astype(f32), rtol=0, atol=0)

    # what a row holds before its first token does not matter, and a row at rest keeps it
    broken = arrays["shift_state"].copy()
    broken[[0, 2]] = np.nan
    again, _, kept = run(**arrays | {"shift_state": broken}).values()
    assert_close(again, first, rtol=0, atol=0)
    assert_close(kept[:2], state[:2], rtol=0, atol=0)
    assert np.isnan(kept[2]).all()

    # padding is not carried on
    padded = arrays | {"x": arrays["x"].copy()}
    padded["x"][1, 5:] = np.nan
    again, _, kept = run(**padded).values()
    assert_close(again[1, :5], first[1, :5], rtol=0, atol=0)
    assert_close(kept, state, rtol=0, atol=0)

    # 2 tokens, then 4, equal 6 at once
    part, _, middle = run(**arrays | {"num_tokens": np.full(3, 2, i32)}).values()
    rest = arrays | {"x": np.roll(arrays["x"], -2, axis=1), "shift_state": middle, "cache_len": arrays["cache_len"] + i32(2)}
    later, _, last = run(**rest | {"num_tokens": np.array([4, 3, 4], i32)}).values()
    assert_close(np.concatenate([part[:, :2], later[:, :4]], 1)[0], first[0], rtol=0, atol=0)
    assert_close(last[:2], state[:2], rtol=0, atol=0)


SPECS = {"x": ((2, 3, 5), f32), "state": ((2, 5), f32), "cache_len": ((2,), i32), "num_tokens": ((2,), i32), "mix": ((5,), f32)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": ((2, 15), f32)}, "wants x [B, T, D] with at least one token"),
        ({"x": ((2, 0, 5), f32)}, "wants x [B, T, D] with at least one token"),
        ({"x": ((2, 3, 5), i32)}, "wants a floating dtype"),
        ({"state": ((2, 4), f32)}, "shift_state must be float32 [2, 5]"),
        ({"state": ((2, 5), np.float16)}, "shift_state must be float32 [2, 5]"),
        ({"cache_len": ((2,), np.int64)}, "cache_len must be int32 [2]"),
        ({"num_tokens": ((1,), i32)}, "num_tokens must be int32 [2]"),
        ({"mix": ((1, 1, 5), f32)}, "a mix must be [5]"),
        ({"mix": ((5,), i32)}, "a mix must have a floating dtype"),
    ],
)
def test_what_is_refused(changes, message):
    refused = refusal(ops.token_shift, *(SPECS | changes).values())
    assert refused.startswith("token_shift(") and refused.endswith(message)


def test_no_mix_is_refused():
    assert refusal(ops.token_shift, *list(SPECS.values())[:-1]).endswith("wants at least one mix")

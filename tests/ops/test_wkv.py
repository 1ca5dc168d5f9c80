"""wkv: the reference, the plain XLA lowering and, where it is built, the kernel."""

import numpy as np
import pytest
from run_op import FLOATS, compiled, normal, reference, refusal, run_op, xla
from tolerance import assert_close

from poptransformer import ops
from poptransformer.ops.wkv import wkv_reference

f32, i32 = np.float32, np.int32
ENGINES = ("reference", "xla", "custom_ops")
NAMES = ("key", "value", "time_decay", "time_first", "wkv_state", "cache_len", "num_tokens")
# Exponents are sums of float32 numbers, of up to 20 here, made in another order; an error of them is one of the weights.
LOOSE = {"rtol": 5e-5, "atol": 2e-5}


def make_engine(name):
    return reference() if name == "reference" else xla(custom_ops=name == "custom_ops")


def wkv(**values):
    return ops.wkv(*(values[name] for name in NAMES))


def problem(B=2, T=3, D=5, *, cache_len, num_tokens, dtype=f32, key_scale=2.0, seed=0):
    """Random arrays, with decays from slow to sudden, and states that hold something in every row."""
    arrays = {
        "key": normal((B, T, D), dtype, seed, key_scale), "value": normal((B, T, D), dtype, seed + 1),
        "time_decay": np.random.default_rng(seed + 2).uniform(-6, 3, D).astype(f32), "time_first": normal((D,), f32, seed + 3),
    }  # fmt: skip
    state = normal((B, 3, D), f32, seed + 4)
    state[:, 1] = np.abs(state[:, 1]) + f32(0.5)
    return arrays | {
        "wkv_state": state,
        "cache_len": np.array(cache_len, i32),
        "num_tokens": np.array(num_tokens, i32),
    }


def by_sums(arrays):
    """All weights of one row at once, in float64, without a state before it: [T, D]."""
    key, value = (arrays[name][0].astype(np.float64) for name in ("key", "value"))
    decay = -np.exp(arrays["time_decay"].astype(np.float64))
    out = []
    for t in range(len(key)):
        exponents = key[: t + 1] + decay * (t - 1 - np.arange(t + 1))[:, None]
        exponents[t] = key[t] + arrays["time_first"]
        weights = np.exp(exponents - exponents.max(0))
        out.append((weights * value[: t + 1]).sum(0) / weights.sum(0))
    return np.array(out)


@pytest.mark.parametrize("engine", ENGINES)
def test_equals_transformers(engine):
    # transformers 5.24.0, float64: rwkv_linear_attention_cpu(decay, first, key, value, return_state=True)
    arrays = {
        "key": np.array([[[1, -2], [0.5, 1], [-1, 2], [2, 0]]], f32),
        "value": np.array([[[1, 2], [3, -4], [5, 6], [-7, 8]]], f32),
        "time_decay": np.array([-1, 0.5], f32), "time_first": np.array([0.3, -0.7], f32),
        "wkv_state": np.full((1, 3, 2), np.nan, f32), "cache_len": np.array([0], i32), "num_tokens": np.array([4], i32),
    }  # fmt: skip
    wanted = [[1, 2], [1.900332011, -3.453262240], [2.312120958, 1.745462240], [-4.947202968, 5.494377430]]
    wanted_state = [[-6.384942200, 11.348688561], [1.263385308, 1.775206444], [2, 0.351278729]]
    out, state = run_op(make_engine(engine), wkv, **arrays)
    assert_close(out, np.array([wanted], f32))
    assert_close(state, np.array([wanted_state], f32))


@pytest.mark.parametrize("T", [1, 2, 40])
def test_reference_equals_sums_over_all_pairs(T):
    arrays = problem(1, T, 6, cache_len=[0], num_tokens=[T])
    arrays = {name: array.astype(np.float64) if array.dtype == f32 else array for name, array in arrays.items()}
    assert_close(wkv_reference(*(arrays[name] for name in NAMES))[0][0], by_sums(arrays), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("custom_ops", [False, True])
@pytest.mark.parametrize(
    "dtype, T, D",
    [("float32", 1, 129), ("float32", 2, 1), ("float32", 16, 3), ("float32", 129, 31),
     ("bfloat16", 1, 17), ("bfloat16", 61, 128), ("float16", 3, 127)],
)  # fmt: skip
def test_lowerings_equal_the_reference(dtype, T, D, custom_ops):
    """Rows that begin, go on, have padding and rest, at their beginning and later."""
    cache_len, num_tokens = [0, 3, 1, 0, 2, 0], [T, T, (T + 1) // 2, T // 2, 0, 0]
    arrays = problem(6, T, D, cache_len=cache_len, num_tokens=num_tokens, dtype=FLOATS[dtype])
    wanted, actual = run_op(reference(), wkv, **arrays), run_op(xla(custom_ops), wkv, **arrays)
    assert_close(actual[0], wanted[0], **LOOSE if dtype == "float32" else {})
    assert_close(actual[1], wanted[1], **LOOSE)
    for b, count in enumerate(num_tokens):
        assert not actual[0][b, count:].any(), "padding gives zeros"
    assert_close(actual[1][4:], arrays["wkv_state"][4:], rtol=0, atol=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_properties(engine):
    """On one compiled program of B = 3, T = 6, D = 5."""
    arrays = problem(3, 6, 5, cache_len=[0, 4, 0], num_tokens=[6, 5, 0])
    run = compiled(make_engine(engine), wkv, **arrays)
    out, state = run(**arrays).values()

    # what a row holds before its first token does not matter, and a row at rest keeps it, bit for bit
    broken = arrays["wkv_state"].copy()
    broken[[0, 2]] = np.nan
    broken[2, 0, 0] = np.inf
    again, kept = run(**arrays | {"wkv_state": broken}).values()
    assert_close(again, out, rtol=0, atol=0)
    assert_close(kept[:2], state[:2], rtol=0, atol=0)
    assert np.array_equal(kept[2].view(np.uint32), broken[2].view(np.uint32))

    # padding changes nothing, a later token nothing before it
    changed = {name: array.copy() for name, array in arrays.items()}
    for name in ("key", "value"):
        changed[name][1, 5:] = np.nan
        changed[name][0, 4:] += 3
    later, kept = run(**changed).values()
    assert_close(later[1], out[1], rtol=0, atol=0)
    assert_close(kept[1], state[1], rtol=0, atol=0)
    assert_close(later[0, :4], out[0, :4], rtol=0, atol=0)
    assert np.abs(later[0, 4] - out[0, 4]).max() > 0.1

    # permuting the batch permutes the results
    order = [2, 0, 1]
    rows = ("key", "value", "wkv_state", "cache_len", "num_tokens")
    permuted, moved = run(**arrays | {name: arrays[name][order] for name in rows}).values()
    assert_close(permuted, out[order], rtol=0, atol=0)
    assert_close(moved, state[order], rtol=0, atol=0)

    # all values equal: so is their average; keys that all grow by the same number change nothing but the maximum
    flat = run(**arrays | {"value": np.full_like(arrays["value"], 0.5)})["0"]
    assert_close(flat[0], np.full((6, 5), 0.5, f32))
    raised, kept = run(**arrays | {"key": arrays["key"] + f32(100)}).values()
    assert_close(raised[0], out[0], rtol=1e-4, atol=1e-4)  # 100 leaves float32 five digits for the rest
    assert_close(kept[0, 2], state[0, 2] + f32(100), rtol=0, atol=1e-4)

    # 2 tokens, then 4, equal 6 at once
    first, middle = run(**arrays | {"num_tokens": np.array([2, 2, 2], i32)}).values()
    rest = arrays | {name: np.roll(arrays[name], -2, axis=1) for name in ("key", "value")}
    rest |= {"wkv_state": middle, "cache_len": arrays["cache_len"] + i32(2), "num_tokens": np.array([4, 3, 0], i32)}
    second, last = run(**rest).values()
    assert_close(np.concatenate([first[:2, :2], second[:2, :4]], 1), out[:2], **LOOSE)
    assert_close(last[:2], state[:2], **LOOSE)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("T", [1, 9])
def test_extreme_numbers_are_safe(engine, T):
    """Keys and decays far beyond what e^x can hold: the heaviest tokens win, nothing overflows."""
    arrays = problem(1, T, 8, cache_len=[0], num_tokens=[T], key_scale=1e4)
    arrays["key"][0, :, 0] = 3e38
    arrays["key"][0, :, 1] = -3e38
    arrays["key"][0, :, 2] = np.where(np.arange(T) % 2, 1e38, -1e38)
    arrays["time_decay"][:] = [0, 0, -3, 200, -200, 89, 20, 3]
    out, state = run_op(make_engine(engine), wkv, **arrays)
    assert np.isfinite(out).all() and np.isfinite(state).all()
    assert (np.abs(out) <= np.abs(arrays["value"]).max(1, keepdims=True) * (1 + 1e-6)).all(), "averages stay in their range"
    wanted = run_op(reference(), wkv, **arrays)
    assert_close(out, wanted[0], **LOOSE)
    assert_close(state, wanted[1], **LOOSE)


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_a_key_that_is_no_number_is_seen(engine):
    arrays = problem(2, 5, 3, cache_len=[0, 0], num_tokens=[5, 5])
    arrays["key"][0, 2] = np.nan
    out, state = run_op(make_engine(engine), wkv, **arrays)
    assert np.isfinite(out[0, :2]).all() and np.isnan(out[0, 2:]).all() and np.isfinite(out[1]).all()
    assert np.isnan(state[0, :2]).all() and np.isfinite(state[1]).all()


SPECS = {
    "key": ((2, 3, 5), f32),
    "value": ((2, 3, 5), f32),
    "time_decay": ((5,), f32),
    "time_first": ((5,), f32),
    "wkv_state": ((2, 3, 5), f32),
    "cache_len": ((2,), i32),
    "num_tokens": ((2,), i32),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": ((2, 15), f32)}, "wants key [B, T, D] with at least one token"),
        ({name: ((2, 0, 5), f32) for name in ("key", "value")}, "wants key [B, T, D] with at least one token"),
        ({name: ((2, 3, 5), i32) for name in ("key", "value")}, "wants a floating dtype"),
        ({"value": ((2, 3, 6), f32)}, "key and value differ"),
        ({"value": ((2, 3, 5), np.float16)}, "key and value differ"),
        ({"time_decay": ((5,), np.float16)}, "time_decay must be float32 [5]"),
        ({"time_first": ((4,), f32)}, "time_first must be float32 [5]"),
        ({"wkv_state": ((2, 5, 3), f32)}, "wkv_state must be float32 [2, 3, 5]"),
        ({"wkv_state": ((2, 3, 5), np.float16)}, "wkv_state must be float32 [2, 3, 5]"),
        ({"cache_len": ((2,), np.int64)}, "cache_len must be int32 [2]"),
        ({"num_tokens": ((1,), i32)}, "num_tokens must be int32 [2]"),
    ],
)
def test_what_is_refused(changes, message):
    refused = refusal(ops.wkv, *(SPECS | changes).values())
    assert refused.startswith("wkv(") and refused.endswith(message)

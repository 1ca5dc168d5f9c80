"""The wkv kernel against the NumPy reference, for every instruction set this machine runs."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from poptransformer.backends.xla import custom_ops
from poptransformer.ops.wkv import wkv_reference

try:
    custom_ops.load_cpu_library()
except custom_ops.MissingLibraryError as error:
    pytest.skip(str(error), allow_module_level=True)

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
# Of the result: against float64, float32 exponents of up to 20 that grow token by token, then one rounding.
TOLERANCE = {"float32": (1e-4, 2e-5), "bfloat16": (2**-7, 2e-5), "float16": (2**-10, 2e-5)}
NAMES = ("key", "value", "time_decay", "time_first", "wkv_state", "cache_len", "num_tokens")
kernel = jax.jit(custom_ops.wkv)


def problem(cache_len, num_tokens, *, T, D, dtype="float32", seed=0):
    """Random inputs. States of rows that begin hold NaN, and so do padded keys: nobody may look at them."""
    rng = np.random.default_rng(seed)
    B = len(cache_len)
    key, value = (rng.standard_normal((B, T, D)).astype(np.float32).astype(DTYPES[dtype]) for _ in range(2))
    time_decay, time_first = rng.uniform(-6, 3, D).astype(np.float32), rng.standard_normal(D).astype(np.float32)
    state = rng.standard_normal((B, 3, D)).astype(np.float32)
    state[:, 1] = np.abs(state[:, 1]) + 0.5
    for b, count in enumerate(num_tokens):
        key[b, count:] = np.nan
        if cache_len[b] == 0:
            state[b] = np.nan
    arrays = (key, value, time_decay, time_first, state, np.array(cache_len, np.int32), np.array(num_tokens, np.int32))
    return dict(zip(NAMES, arrays, strict=True))


def check(arrays):
    out, state = (np.asarray(result) for result in kernel(**arrays))
    wide = {name: array if array.dtype == np.int32 else array.astype(np.float64) for name, array in arrays.items()}
    wanted, wanted_state = wkv_reference(*wide.values())
    assert out.shape == arrays["key"].shape and out.dtype == arrays["key"].dtype and state.dtype == np.float32
    rtol, atol = TOLERANCE[next(name for name, dtype in DTYPES.items() if out.dtype == dtype)]
    np.testing.assert_allclose(out.astype(np.float64), wanted, rtol=rtol, atol=atol)
    np.testing.assert_allclose(state, wanted_state, rtol=1e-4, atol=2e-5)
    for b, count in enumerate(arrays["num_tokens"]):
        assert not out[b, count:].any()
        if count == 0:
            assert_same_bits(state[b], arrays["wkv_state"][b])
    return out, state


def assert_same_bits(actual, wanted):
    assert actual.dtype == wanted.dtype and actual.shape == wanted.shape
    np.testing.assert_array_equal(actual.view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [1, 3, 16, 31, 64, 127, 129, 768])
def test_widths(D, dtype):
    """Widths around whole vectors and blocks; rows that begin, go on, have padding and rest."""
    for T in (1, 7):
        check(problem([0, 5, 3, 0, 2], [T, T, (T + 1) // 2, 0, 0], T=T, D=D, dtype=dtype))


def test_one_call_of_many_tokens():
    """Enough for all threads."""
    check(problem([0, 9], [300, 123], T=300, D=193))


def test_exponents_of_every_size():
    arrays = problem([0, 4], [6, 6], T=6, D=20)
    arrays["key"] *= np.logspace(-3, 37, 20).astype(np.float32)
    arrays["time_decay"][::3] = np.float32([-300, -30, 30, 88, 89, 1e4, 3e38])
    out, state = check(arrays)
    assert np.isfinite(out).all() and np.isfinite(state).all()


def test_rows_and_pieces_do_not_change_a_bit():
    """A row gives the same alone, in a batch, at once and token by token: one thread sums a feature in one order."""
    arrays = problem([0, 3, 0], [150, 140, 77], T=150, D=150)
    out, state = check(arrays)
    for b in range(3):
        alone = {name: array if name.startswith("time_") else array[b : b + 1] for name, array in arrays.items()}
        for result, wanted in zip(kernel(**alone), (out, state), strict=True):
            assert_same_bits(np.asarray(result), wanted[b : b + 1])
    pieces, now, done = [], arrays["wkv_state"], arrays["cache_len"]
    for begin, end in ((0, 70), (70, 71), (71, 149), (149, 150)):
        count = np.clip(arrays["num_tokens"] - begin, 0, end - begin).astype(np.int32)
        part = {name: arrays[name][:, begin:end] for name in ("key", "value")}
        piece, now = kernel(**arrays | part | {"wkv_state": now, "cache_len": done, "num_tokens": count})
        pieces.append(np.asarray(piece))
        done = done + count
    assert_same_bits(np.concatenate(pieces, axis=1), out)
    assert_same_bits(np.asarray(now), state)


def test_a_donated_state_is_updated_in_place_by_a_loop():
    arrays = problem([0, 0], [20, 20], T=20, D=37)
    wanted, wanted_state = kernel(**arrays)

    def loop(key, value, time_decay, time_first, state):
        def body(carry):
            step, state, outs = carry
            k, v = (jax.lax.dynamic_slice_in_dim(x, step, 1, axis=1) for x in (key, value))
            lengths, ones = jnp.full(2, step, jnp.int32), jnp.ones(2, jnp.int32)
            out, state = custom_ops.wkv(k, v, time_decay, time_first, state, lengths, ones)
            return step + 1, state, jax.lax.dynamic_update_slice_in_dim(outs, out, step, axis=1)

        return jax.lax.while_loop(lambda carry: carry[0] < 20, body, (jnp.int32(0), state, jnp.zeros_like(key)))[1:]

    inputs = [jnp.array(arrays[name]) for name in NAMES[:5]]
    compiled = jax.jit(loop, donate_argnums=4).lower(*inputs).compile()
    assert "f32[2,3,37]{2,1,0} copy(" not in compiled.as_text()
    address = inputs[4].unsafe_buffer_pointer()
    state, outs = compiled(*inputs)
    assert state.unsafe_buffer_pointer() == address
    assert_same_bits(np.asarray(outs), np.asarray(wanted))
    assert_same_bits(np.asarray(state), np.asarray(wanted_state))


@pytest.mark.parametrize("cache_len, num_tokens", [([0, -1], [2, 1]), ([0, 4], [2, -1]), ([0, 4], [2, 3])])
def test_rows_that_do_not_fit(cache_len, num_tokens):
    arrays = problem([0, 4], [2, 2], T=2, D=5)
    arrays |= {"cache_len": np.int32(cache_len), "num_tokens": np.int32(num_tokens)}
    wanted = rf"wkv: row 1: cache_len {cache_len[1]} and num_tokens {num_tokens[1]} do not fit 2 new positions"
    with pytest.raises(Exception, match=wanted):
        jax.block_until_ready(kernel(**arrays))


def test_shapes_and_dtypes_that_do_not_fit():
    def error_of(**changes):
        with pytest.raises(Exception) as caught:
            jax.block_until_ready(kernel(**problem([0], [2], T=2, D=5) | changes))
        return str(caught.value)

    assert "wkv: key [B, T, D] has 3 axes; got [2, 5]" in error_of(key=np.zeros((2, 5), np.float32))
    assert "wkv: value has shape [1, 2, 4]" in error_of(value=np.zeros((1, 2, 4), np.float32))
    assert "wkv: time_decay has shape [4]" in error_of(time_decay=np.zeros(4, np.float32))
    assert "wkv: wkv_state has shape [1, 5, 3]" in error_of(wkv_state=np.zeros((1, 5, 3), np.float32))
    assert "must have one dtype of float32, bfloat16 and float16" in error_of(value=np.zeros((1, 2, 5), np.float16))


IS_INNER_RUN = "POPTRANSFORMER_ISA" in os.environ or "POPTRANSFORMER_NUM_THREADS" in os.environ


@pytest.mark.skipif(IS_INNER_RUN, reason="this is the run that it starts")
@pytest.mark.parametrize("isa, num_threads", [("portable", "3"), ("avx2", "1")])
def test_other_instruction_sets_and_thread_counts(isa, num_threads):
    """All tests of this file again in a process with those settings, since the choice is made once."""
    environment = os.environ | {"POPTRANSFORMER_ISA": isa, "POPTRANSFORMER_NUM_THREADS": num_threads}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(pathlib.Path(__file__))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "skipped" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]

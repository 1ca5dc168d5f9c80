"""Every kernel against the definition, on problems that hypothesis draws, for every instruction set this machine runs.

Attention's are in test_attention.py. POPTRANSFORMER_FUZZ=n makes a long run of it, see tests/fuzz.py.
"""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuzz import fuzz_settings
from hypothesis import given
from hypothesis import strategies as st
from run_op import FLOATS

from poptransformer.backends.xla import custom_ops
from poptransformer.ops.wkv import wkv_reference
from poptransformer.packing import BITS, GROUP_SIZES, WHOLE_ROW, Packing

try:
    LIBRARY = custom_ops.load_cpu_library()
except custom_ops.MissingLibraryError as error:
    pytest.skip(str(error), allow_module_level=True)

SIZES = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 127, 128, 129, 200, 257, 513]))
DTYPES = st.sampled_from(list(FLOATS))
ROUNDING = {"float32": 2**-24, "bfloat16": 2**-8, "float16": 2**-11}


def random(seed, shape, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(FLOATS[dtype])


def assert_within(actual, wanted, error, dtype):
    """Of a float64 result, what float32 arithmetic and one rounding may make: |error| beside the rounding of the dtype."""
    assert actual.shape == wanted.shape and actual.dtype == FLOATS[dtype]
    off = np.abs(actual.astype(np.float64) - wanted) - ROUNDING[dtype] * 1.01 * np.abs(wanted)
    assert (off <= error).all(), (
        f"off by {off.max():g}, where {np.broadcast_to(error, off.shape)[off == off.max()][0]:g} is right"
    )


@fuzz_settings(30)
@given(
    seed=st.integers(0, 2**32 - 1), rows=st.integers(0, 40), size_in=SIZES, size_out=SIZES, x_dtype=DTYPES, weight_dtype=DTYPES,
    out_dtype=DTYPES, has_bias=st.booleans(),
)  # fmt: skip
def test_linear(seed, rows, size_in, size_out, x_dtype, weight_dtype, out_dtype, has_bias):
    if custom_ops.linear_refusal(jnp.zeros((rows, 1), FLOATS[x_dtype]), jnp.zeros((1, 1), FLOATS[weight_dtype])):
        rows %= custom_ops.MAX_LINEAR_ROWS + 1
    x, weight = random(seed, (rows, size_in), x_dtype), random(seed + 1, (size_out, size_in), weight_dtype)
    bias = random(seed + 2, (size_out,), x_dtype) if has_bias else None
    run = jax.jit(custom_ops.linear, static_argnums=3)
    out = np.asarray(run(x, weight, bias, FLOATS[out_dtype]))
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    bias = 0 if bias is None else bias.astype(np.float64)
    assert_within(out, x @ weight.T + bias, 1e-6 * (np.abs(x) @ np.abs(weight).T + np.abs(bias)), out_dtype)


@fuzz_settings(30)
@given(
    seed=st.integers(0, 2**32 - 1), rows=st.integers(0, 40), size_in=SIZES, size_out=SIZES, x_dtype=DTYPES, out_dtype=DTYPES,
    kind=st.sampled_from(list(BITS)), group_size=st.sampled_from(GROUP_SIZES), has_bias=st.booleans(),
)  # fmt: skip
def test_packed_linear(seed, rows, size_in, size_out, x_dtype, out_dtype, kind, group_size, has_bias):
    packing = Packing(kind, WHOLE_ROW if kind == "fp8" else group_size, size_out, size_in)
    weight = packing.pack(random(seed, (size_out, size_in)))
    x = random(seed + 1, (rows, size_in), x_dtype)
    bias = random(seed + 2, (size_out,), x_dtype) if has_bias else None
    run = jax.jit(custom_ops.packed_linear, static_argnums=(3, 4))
    out = np.asarray(run(x, weight, bias, packing, FLOATS[out_dtype]))
    values, wide = packing.unpack(weight).astype(np.float64), x.astype(np.float64)
    bias = 0 if bias is None else bias.astype(np.float64)
    if LIBRARY.has_tiles and rows >= custom_ops.PACKED_TILE_ROWS:
        step = 2 * 2.0**-8 * np.abs(wide)  # both rounded to bfloat16
    elif kind == "fp8":
        step = 0 * wide
    else:  # half a step of 1 / 127 of the largest of 32
        padded = np.zeros((rows, -(-size_in // 32) * 32))
        padded[:, :size_in] = np.abs(wide)
        largest = padded.reshape(rows, -(-size_in // 32), 32).max(-1)
        step = np.repeat(largest, 32, axis=1)[:, :size_in] / 254
    error = 1.01 * step @ np.abs(values).T + 1e-6 * (np.abs(wide) @ np.abs(values).T + np.abs(bias))
    assert_within(out, wide @ values.T + bias, error * (1 + ROUNDING[out_dtype]), out_dtype)


@fuzz_settings(20)
@given(seed=st.integers(0, 2**32 - 1), width=SIZES, num_new=st.sampled_from([1, 2, 9, 40]), dtype=DTYPES, data=st.data())
def test_wkv(seed, width, num_new, dtype, data):
    rows = data.draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, num_new)), min_size=1, max_size=3), "rows")
    cache_len, num_tokens = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    key, value = (random(seed + i, (len(rows), num_new, width), dtype) for i in range(2))
    decay, first = (random(seed + i, (width,)) for i in (2, 3))
    state = np.abs(random(seed + 4, (len(rows), 3, width))) + 0.5
    out, after = (np.asarray(x) for x in jax.jit(custom_ops.wkv)(key, value, decay, first, state, cache_len, num_tokens))
    wide = [x.astype(np.float64) for x in (key, value, decay, first, state)]
    wanted, wanted_after = wkv_reference(*wide, cache_len, num_tokens)
    assert_within(out, wanted, 1e-4, dtype)
    np.testing.assert_allclose(after, wanted_after, rtol=1e-4, atol=2e-5)


@fuzz_settings(10)
@given(
    seed=st.integers(0, 2**32 - 1), num_rows=st.integers(1, 50), width=SIZES, shape=st.lists(st.integers(0, 5), max_size=3),
    dtype=st.sampled_from([*FLOATS, "uint8"]),
)  # fmt: skip
def test_gather(seed, num_rows, width, shape, dtype):
    generator = np.random.default_rng(seed)
    table = generator.integers(0, 256, (num_rows, width)).astype(FLOATS.get(dtype, np.uint8))
    indices = generator.integers(0, num_rows, shape).astype(np.int32)
    np.testing.assert_array_equal(np.asarray(jax.jit(custom_ops.gather)(table, indices)), table[indices])


@pytest.mark.skipif("POPTRANSFORMER_ISA" in os.environ, reason="this is the run that it starts")
@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
def test_other_instruction_sets(isa):
    """All tests of this file again in a process with that setting, since the choice is made once."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(pathlib.Path(__file__))]
    environment = os.environ | {"POPTRANSFORMER_ISA": isa, "POPTRANSFORMER_NUM_THREADS": "3"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]

"""The packed_linear kernel against products in float64 of what it multiplies: unpacked weights and quantised rows."""

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
from poptransformer.packing import GROUP_SIZES, Packing

try:
    LIBRARY = custom_ops.load_cpu_library()
except custom_ops.MissingLibraryError as error:
    pytest.skip(str(error), allow_module_level=True)

TILE_ROWS = custom_ops.PACKED_TILE_ROWS  # from so many on tiles multiply bfloat16, where the CPU has them
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def quantised(x):
    """Rows as the kernel takes them: 32 inputs at a time in steps of 1 / 127 of the largest."""
    rows, size = x.shape
    padded = np.zeros((rows, -(-size // 32) * 32), np.float32)
    padded[:, :size] = x
    units = padded.reshape(rows, -1, 32)
    scale = np.abs(units).max(-1, keepdims=True) / np.float32(127)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    return (np.rint(units * inverse) * scale).reshape(rows, -1)[:, :size]


def rounded(x):
    return x.astype(ml_dtypes.bfloat16)


def run(x, weight, bias, packing, out_dtype=jnp.float32):
    return np.asarray(jax.jit(custom_ops.packed_linear, static_argnums=(3, 4))(x, weight, bias, packing, out_dtype))


def problem(packing, num_rows, dtype=np.float32, seed=0):
    generator = np.random.default_rng(seed)
    weight = packing.pack(
        (generator.standard_normal((packing.out_features, packing.in_features)) * 0.1 + 0.02).astype(np.float32)
    )
    x = generator.standard_normal((num_rows, packing.in_features)).astype(dtype)
    bias = generator.standard_normal(packing.out_features).astype(dtype)
    if LIBRARY.has_tiles and num_rows >= TILE_ROWS:
        rows, values = rounded(x), rounded(packing.unpack(weight))
    elif packing.kind == "fp8":
        rows, values = x, packing.unpack(weight)
    else:
        rows, values = quantised(x.astype(np.float32)), packing.unpack(weight)
    wanted = rows.astype(np.float64) @ values.T.astype(np.float64)
    return x, weight, bias, wanted + bias.astype(np.float64)


FORMS = [*((kind, size) for kind in ("int8", "int4") for size in GROUP_SIZES), ("fp8", -1)]
# (rows of x, (out_features, in_features))
ODD_SIZES = (
    (1, (1, 1)), (2, (17, 33)), (3, (129, 127)), (4, (31, 64)), (5, (3, 17)), (6, (48, 200)), (7, (16, 32)), (8, (260, 769)),
    (9, (40, 96)), (11, (33, 130)), (12, (1, 1)), (33, (17, 33)), (21, (33, 130)), (70, (129, 257)), (1, (2304, 768)),
)  # fmt: skip


@pytest.mark.parametrize("kind, group_size", FORMS)
def test_agrees_with_the_definition_at_odd_sizes(kind, group_size):
    for number, (num_rows, shape) in enumerate(ODD_SIZES):
        packing = Packing(kind, group_size, *shape)
        x, weight, bias, wanted = problem(packing, num_rows, seed=number)
        np.testing.assert_allclose(run(x, weight, bias, packing), wanted, rtol=1e-5, atol=2e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind, group_size", [("int4", 32), ("fp8", -1)])
def test_each_dtype_of_rows_and_results(dtype, kind, group_size):
    packing = Packing(kind, group_size, 37, 70)
    x, weight, bias, wanted = problem(packing, 3, DTYPES[dtype])
    wide = run(x, weight, bias, packing)
    np.testing.assert_allclose(wide, wanted, rtol=1e-5, atol=1e-5)
    for out in DTYPES.values():
        np.testing.assert_array_equal(run(x, weight, bias, packing, out), wide.astype(out))
    without = run(x, weight, None, packing)
    np.testing.assert_allclose(without + bias.astype(np.float32), wide, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind, group_size", [("int8", 64), ("int4", 64), ("fp8", -1)])
def test_a_row_does_not_depend_on_the_others(kind, group_size):
    """Among few rows, and among many."""
    packing = Packing(kind, group_size, 600, 300)
    x, weight, bias, _ = problem(packing, 300)
    few, many = run(x[: TILE_ROWS - 1], weight, bias, packing), run(x, weight, bias, packing)
    for rows in (slice(0, 1), slice(7, 9), slice(3, 11)):
        np.testing.assert_array_equal(run(x[rows], weight, bias, packing), few[rows])
    for rows in (slice(0, 12), slice(7, 49), slice(280, 300)):
        np.testing.assert_array_equal(run(x[rows], weight, bias, packing), many[rows])
    np.testing.assert_allclose(many[: TILE_ROWS - 1], few, atol=0.08 * few.std())


def test_rows_of_zeros_small_and_infinite_values():
    packing = Packing("int8", 32, 20, 70)
    x, weight, bias, _ = problem(packing, 6)
    x[0], x[1] = 0, x[1] * np.float32(1e-40)
    x[2, 5], x[3, 69], x[4] = np.nan, np.inf, x[4] * np.float32(1e36)
    y = run(x, weight, None, packing)
    assert (y[0] == 0).all() and np.isfinite(y[1]).all() and np.abs(y[1]).max() < 1e-37
    assert np.isnan(y[2]).all() and not np.isfinite(y[3]).any()
    exact = x[4].astype(np.float64) @ packing.unpack(weight).T.astype(np.float64)
    assert np.abs(y[4] - exact).max() < 0.02 * np.abs(exact).max()
    np.testing.assert_array_equal(y[5], run(x[5:], weight, None, packing)[0])


def test_every_float8():
    """Each code but NaN times one and times the largest: exact, subnormal ones too, on whichever thread."""
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    shape = (2000, len(codes))
    packing = Packing("fp8", -1, *shape)
    scales = np.linspace(0.5, 2, shape[0], dtype=np.float32)[:, None]
    weight = packing.assemble(np.broadcast_to(codes, shape), scales, None)
    x = np.eye(len(codes), dtype=np.float32)[: TILE_ROWS - 1]
    for begin in (0, 60, 127, 127 + 60):
        y = run(np.roll(x, begin, axis=1), weight, None, packing)
        np.testing.assert_array_equal(y, packing.unpack(weight)[:, begin : begin + len(x)].T)


def test_float8_rows_that_are_not_finite():
    packing = Packing("fp8", -1, 20, 70)
    x, weight, _, _ = problem(packing, 4)
    x[0], x[1, 5], x[2, 69] = 0, np.nan, np.inf
    y = run(x, weight, None, packing)
    assert (y[0] == 0).all() and np.isnan(y[1]).all() and not np.isfinite(y[2]).any()
    np.testing.assert_array_equal(y[3], run(x[3:], weight, None, packing)[0])


def test_the_largest_codes_do_not_overflow():
    """All codes and inputs at their ends, where sums in 16 bits would be cut off."""
    packing = Packing("int8", -1, 16, 4096)
    codes = np.full((16, 4096), 255, np.uint8)
    codes[1::2] = 0  # -128, which only files of others have
    weight = packing.assemble(codes, np.full((16, 1), 1, np.float16), None)
    x = np.full((1, 4096), 127, np.float32)
    wanted = np.where(np.arange(16) % 2, -128.0, 127.0) * 127 * 4096
    np.testing.assert_allclose(run(x, weight, None, packing)[0], wanted, rtol=1e-6)


def test_wrong_buffers_are_refused():
    packing = Packing("int8", 32, 20, 70)
    x, weight, bias, _ = problem(packing, 2)
    with pytest.raises(Exception, match="does not fit 20 x 70 codes of 8 bits"):
        run(x, weight[:, 64:], bias, packing)
    with pytest.raises(Exception, match="bias must be"):
        run(x, weight, bias[1:], packing)
    with pytest.raises(Exception, match="does not fit 20 x 69 codes"):
        run(x[:, 1:], weight[:, 64:], bias, packing)


@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_other_instruction_sets(isa):
    """The same tests again where the library picks another path; it picks once a process."""
    if os.environ.get("POPTRANSFORMER_ISA"):
        pytest.skip("an instruction set is chosen already")
    here = pathlib.Path(__file__)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(here)],
        env=os.environ | {"POPTRANSFORMER_ISA": isa}, capture_output=True, text=True, timeout=600, cwd=here.parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]

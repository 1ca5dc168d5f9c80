"""The linear kernel against a product in float64."""

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

try:
    LIBRARY = custom_ops.load_cpu_library()
except custom_ops.MissingLibraryError as error:
    pytest.skip(str(error), allow_module_level=True)

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
# Sums of up to 769 products in float32, in another order than the reference's: the error grows with the root of the length.
TOLERANCE = 2e-5


def random(generator, shape, dtype):
    return generator.standard_normal(shape, dtype=np.float32).astype(dtype)


def run(x, weight, bias, out_dtype=jnp.float32):
    return np.asarray(jax.jit(custom_ops.linear, static_argnums=3)(x, weight, bias, out_dtype))


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_agrees_with_the_definition_at_odd_sizes(x_dtype, weight_dtype):
    generator = np.random.default_rng(0)
    for rows, size_in, size_out in (
        (1, 1, 1),
        (2, 7, 5),
        (3, 127, 129),
        (4, 64, 131),
        (5, 17, 3),
        (8, 769, 260),
        (1, 768, 2304),
    ):
        x = random(generator, (rows, size_in), DTYPES[x_dtype])
        weight = random(generator, (size_out, size_in), DTYPES[weight_dtype]) / DTYPES[weight_dtype](8)
        bias = random(generator, (size_out,), DTYPES[x_dtype])
        product = x.astype(np.float64) @ weight.astype(np.float64).T
        np.testing.assert_allclose(run(x, weight, None), product, atol=TOLERANCE, rtol=TOLERANCE)
        np.testing.assert_allclose(run(x, weight, bias), product + bias.astype(np.float64), atol=TOLERANCE, rtol=TOLERANCE)


def test_many_rows_of_bfloat16_in_tiles():
    if not LIBRARY.has_tiles:
        pytest.skip("needs a CPU with AMX, and POPTRANSFORMER_ISA not set")
    generator, bfloat16 = np.random.default_rng(2), ml_dtypes.bfloat16
    for rows, size_in, size_out in ((9, 1, 1), (32, 33, 17), (33, 257, 129), (70, 96, 300), (300, 576, 40)):
        x, weight, bias = (random(generator, shape, bfloat16) for shape in ((rows, size_in), (size_out, size_in), (size_out,)))
        product = x.astype(np.float64) @ weight.astype(np.float64).T
        scale = np.abs(product).max()
        np.testing.assert_allclose(run(x, weight, None), product, rtol=1e-5, atol=1e-5 * scale)
        wanted = product + bias.astype(np.float64)
        np.testing.assert_allclose(run(x, weight, bias), wanted, rtol=1e-5, atol=1e-5 * scale)
        np.testing.assert_array_equal(run(x[-9:], weight, bias), run(x, weight, bias)[-9:])


def test_many_rows_of_other_dtypes_are_refused():
    generator = np.random.default_rng(3)
    x, weight = random(generator, (9, 40), np.float32), random(generator, (5, 40), np.float32)
    assert custom_ops.linear_refusal(x, weight) == "9 rows in float32, the kernel takes up to 8"
    assert custom_ops.linear_refusal(x[:8], weight) is None
    with pytest.raises(Exception, match="x has 9 rows, at most 8 are supported for these dtypes on this CPU"):
        run(x, weight, None)


def test_result_is_rounded_once():
    generator = np.random.default_rng(1)
    x, weight, bias = (random(generator, shape, np.float32) for shape in ((3, 40), (9, 40), (9,)))
    wide = run(x, weight, bias)
    np.testing.assert_array_equal(run(x, weight, bias, jnp.bfloat16), wide.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(run(x, weight, bias, jnp.float16), wide.astype(np.float16))


def test_rows_do_not_depend_on_their_neighbours():
    generator = np.random.default_rng(2)
    x, weight = random(generator, (8, 300), np.float32), random(generator, (517, 300), np.float32)
    together = run(x, weight, None)
    for count in range(1, 9):
        np.testing.assert_array_equal(run(x[:count], weight, None), together[:count])


def test_leading_axes_are_kept_and_empty_sums_are_the_bias():
    x = np.ones((2, 2, 0), np.float32)
    result = run(x, np.ones((3, 0), np.float32), np.float32([1, 2, 3]))
    np.testing.assert_array_equal(result, np.broadcast_to(np.float32([1, 2, 3]), (2, 2, 3)))


def test_wrong_buffers_are_refused():
    weight = np.ones((3, 4), np.float32)
    with pytest.raises(Exception, match=r"linear: x has 9 rows, at most 8"):
        run(np.ones((9, 4), np.float32), weight, None)
    with pytest.raises(Exception, match=r"linear: wanted x \[M, I\], weight \[O, I\]"):
        run(np.ones((1, 5), np.float32), weight, None)
    with pytest.raises(Exception, match=r"linear: bias must be \[O\] or empty"):
        run(np.ones((1, 4), np.float32), weight, np.ones(2, np.float32))


@pytest.mark.parametrize("isa", ["portable", "avx2"])
@pytest.mark.parametrize("num_threads", ["1", "3"])
def test_other_instruction_sets_and_thread_counts(isa, num_threads):
    """In a process of its own, since the choice is made once."""
    test = "test_agrees_with_the_definition_at_odd_sizes[float16-bfloat16]"
    environment = dict(os.environ, POPTRANSFORMER_ISA=isa, POPTRANSFORMER_NUM_THREADS=num_threads)
    arguments = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{pathlib.Path(__file__)}::{test}"]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout + done.stderr

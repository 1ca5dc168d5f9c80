"""Rows of KV caches: how far they are from what was stored, byte by byte where that is a format of our own."""

import ml_dtypes
import numpy as np
import pytest

from poptransformer import kv_cache
from poptransformer.float8 import FLOAT8, LARGEST, to_float8

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float8": FLOAT8, "int8": np.int8}


def rows(shape, seed=0):
    return (np.random.default_rng(seed).standard_normal(shape) * [[0.01], [1], [30]]).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 17, 64])
def test_errors_are_bounded(dtype, head_dim):
    x = rows((4, 3, head_dim))
    stored = kv_cache.store(x, DTYPES[dtype])
    assert stored.dtype == DTYPES[dtype] and stored.shape == (4, 3, kv_cache.row_width(head_dim, DTYPES[dtype]))
    error = np.abs(kv_cache.load(stored) - x)
    largest = np.abs(x).max(-1, keepdims=True)
    bounds = {"float32": 0 * x, "float16": 2**-11 * np.abs(x) + 2**-25, "bfloat16": 2**-8 * np.abs(x)}
    bounds |= {"float8": np.maximum(2**-4 * np.abs(x), 2**-10), "int8": largest / 127 * 0.5001 + 0 * x}
    assert (error <= bounds[dtype]).all()
    if head_dim > 1:  # one number alone is the largest of its row
        assert (error.max() > 0) == (dtype != "float32")


def test_a_row_of_codes():
    row = kv_cache.store(np.float32([-254, 0, 1, 254, 100.9, -3]), np.int8)
    np.testing.assert_array_equal(row[:6], [-127, 0, 0, 127, 50, -2])
    assert row[6:].view(np.float32) == np.float32(2)
    np.testing.assert_array_equal(kv_cache.load(row), [-254, 0, 0, 254, 100, -4])
    np.testing.assert_array_equal(kv_cache.store(np.full(3, 1e-30, np.float32), np.int8), np.zeros(7, np.int8))
    for bad in (np.nan, np.inf, -np.inf):
        row = kv_cache.store(np.float32([1, bad, 2]), np.int8)
        assert not row[:3].any() and np.isnan(kv_cache.load(row)).all()


def test_every_float8():
    """All 256 come back; in between the nearer one, of two the even one; beyond the largest it is that."""
    codes = np.arange(256, dtype=np.uint8)
    values = codes.view(FLOAT8).astype(np.float32)
    is_number = ~np.isnan(values)
    np.testing.assert_array_equal(np.flatnonzero(~is_number), [0x7F, 0xFF])
    np.testing.assert_array_equal(to_float8(values[is_number]).view(np.uint8), codes[is_number])
    positive = values[:0x7F]
    middles = (positive[1:] + positive[:-1]) / 2
    even = np.where(codes[:0x7E] % 2, codes[1:0x7F], codes[:0x7E])
    np.testing.assert_array_equal(to_float8(middles).view(np.uint8), even)
    np.testing.assert_array_equal(to_float8(np.nextafter(middles, 0)).view(np.uint8), codes[:0x7E])
    np.testing.assert_array_equal(to_float8(-np.nextafter(middles, 999)).view(np.uint8), codes[1:0x7F] | 0x80)
    np.testing.assert_array_equal(to_float8(np.float32([449, 1e9, -1e38])).astype(np.float32), [LARGEST, LARGEST, -LARGEST])
    assert np.isnan(to_float8(np.float32([np.inf, -np.inf, np.nan])).astype(np.float32)).all()


def test_rows_are_independent():
    x = rows((2, 3, 8))
    whole = kv_cache.store(x, np.int8)
    np.testing.assert_array_equal(kv_cache.store(x[1, 2], np.int8), whole[1, 2])

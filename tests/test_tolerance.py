"""The comparison that the other tests rely on."""

import ml_dtypes
import numpy as np
import pytest
from tolerance import assert_close


def test_says_where_the_worst_element_is():
    expected = np.zeros((2, 3), np.float32)
    actual = expected.copy()
    actual[0, 1], actual[1, 2] = 1e-3, -2
    with pytest.raises(AssertionError, match=r"2 of 6 elements are off .* the worst is \[1, 2\]: -2.0, expected 0.0"):
        assert_close(actual, expected)
    assert_close(actual, expected, atol=2)
    with pytest.raises(AssertionError, match=r"1 of 2 elements .* the worst is \[1\]: 3, expected 4"):
        assert_close(np.array([1, 3]), np.array([1, 4]))


def test_shape_then_dtype_then_values():
    with pytest.raises(AssertionError, match=r"shape \(2,\), expected \(1, 2\)"):
        assert_close(np.zeros(2, np.float32), np.ones((1, 2)))
    with pytest.raises(AssertionError, match="dtype float32, expected float64"):
        assert_close(np.zeros(2, np.float32), np.ones(2))


def test_tolerance_follows_the_dtype():
    one = np.ones(3)
    assert_close((one * 1.005).astype(ml_dtypes.bfloat16), one.astype(ml_dtypes.bfloat16))
    for dtype in (np.float64, np.float32, np.float16):
        with pytest.raises(AssertionError):
            assert_close((one * 1.005).astype(dtype), one.astype(dtype))
    with pytest.raises(AssertionError):
        assert_close(np.array([True]), np.array([False]))


def test_infinities_and_nan_equal_only_themselves():
    special = np.array([np.inf, -np.inf, np.nan], np.float32)
    assert_close(special, special)
    for other in (special[::-1], np.array([np.inf, np.inf, np.nan], np.float32), np.ones(3, np.float32)):
        with pytest.raises(AssertionError):
            assert_close(special, other)
    assert_close(np.zeros((0, 2)), np.zeros((0, 2)))
    assert_close(np.float32(1), np.float32(1))

"""How close results must be, and the comparison that says so: shape, then dtype, then values."""

from __future__ import annotations

import ml_dtypes
import numpy as np

# dtype -> (rtol, atol). Integers and bool are exact. A test that needs more says why beside its own numbers.
TOLERANCE = {
    np.dtype(np.float64): (1e-12, 1e-13),
    np.dtype(np.float32): (1e-5, 1e-6),
    np.dtype(np.float16): (1e-3, 1e-3),
    np.dtype(ml_dtypes.bfloat16): (1e-2, 1e-2),
}


def assert_close(actual, expected, rtol=None, atol=None):
    """Compare arrays; NaN equals NaN, and an infinity only itself.

    Args:
      actual: what was computed; its dtype chooses the tolerance.
      expected: an array of the same shape and dtype.
      rtol, atol: |actual - expected| <= atol + rtol * |expected|; None takes the table's.
    Raises: AssertionError that names the worst element, both values and how many are off.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
    table_rtol, table_atol = TOLERANCE.get(actual.dtype, (0, 0))
    rtol, atol = table_rtol if rtol is None else rtol, table_atol if atol is None else atol
    if actual.dtype not in TOLERANCE:
        excess = (actual != expected).astype(np.float64)
    else:
        wide, wanted = actual.astype(np.float64), expected.astype(np.float64)
        with np.errstate(invalid="ignore"):
            same = (wide == wanted) | (np.isnan(wide) & np.isnan(wanted))
            excess = np.where(same, -np.inf, np.abs(wide - wanted) - atol - rtol * np.abs(wanted))
        excess[~same & ~(np.isfinite(wide) & np.isfinite(wanted))] = np.inf
    if not np.any(excess > 0):
        return
    worst = np.unravel_index(np.argmax(excess), excess.shape)
    index = f"[{', '.join(str(int(i)) for i in worst)}]"
    raise AssertionError(
        f"{np.sum(excess > 0)} of {excess.size} elements are off by more than rtol={rtol:g}, atol={atol:g}; "
        f"the worst is {index}: {actual[worst]}, expected {expected[worst]}"
    )

"""8-bit floats, e4m3: a sign, 4 bits of exponent, 3 of fraction; no infinity, one NaN, up to 448, down to 2 ** -9.

Source: Micikevicius et al. 2022, arXiv:2209.05433.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST = 448.0  # 0x7e; 0x7f is NaN


def to_float8(x: np.ndarray) -> np.ndarray:
    """Round to nearest even; finite values beyond 448 become 448, what is not finite NaN (0x7f)."""
    wide = x.astype(np.float32)
    return np.where(np.isfinite(wide), np.clip(wide, -LARGEST, LARGEST), np.float32(np.nan)).astype(FLOAT8)

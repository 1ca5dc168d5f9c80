"""Fused query, key and value projections whose rows lie head by head in the checkpoint."""

from __future__ import annotations

import numpy as np


def part_by_part(num_rows: int, num_heads: int) -> np.ndarray:
    """Row order of a fused projection that a checkpoint holds head by head: part by part, as the layer Attention wants it.

    Args:
      num_rows: N * 3 * H: for each head its rows of the query, of the key, of the value.
      num_heads: N.
    Returns: [3 * N * H] int: rows of the queries of all heads, then of the keys, then of the values.
    """
    return np.arange(num_rows).reshape(num_heads, 3, -1).swapaxes(0, 1).reshape(-1)

"""Fused query, key and value projections whose rows lie head by head in the checkpoint."""

from __future__ import annotations


def part_by_part(array, num_heads: int):
    """Reorder a fused projection's weight or bias from head by head to part by part, as the layer Attention wants it.

    Args:
      array: [N * 3 * H, ...], for each head its rows of the query, of the key, of the value.
      num_heads: N.
    Returns: [3 * N * H, ...], the queries of all heads, then the keys, then the values.
    """
    by_head = array.reshape(num_heads, 3, -1, *array.shape[1:])
    return by_head.swapaxes(0, 1).reshape(array.shape)

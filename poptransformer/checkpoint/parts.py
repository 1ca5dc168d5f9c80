"""Reading the part of a weight that one tensor-parallel rank holds, and no more than that part."""

from __future__ import annotations

import numpy as np

from poptransformer.checkpoint.tensor_file import aligned_empty


def read_part(checkpoint, key: str, shape, cut, rank: int, row_order=None, dtype=None, transpose=False) -> np.ndarray:
    """Read a rank's part of a weight.

    Args:
      shape: of the whole weight as the model has it, [out_features, in_features] or [out_features].
      cut: its Cut, or None for the whole weight.
      row_order: for each row of the model's weight the row of the checkpoint's, or None where they are the same.
      dtype: of the result; None keeps the stored one.
      transpose: whether the checkpoint has the weight's axes swapped.
    Returns: the local array; zeros where the cut fills up.
    """
    if cut is None and row_order is None:
        return checkpoint.read(key, dtype=dtype, transpose=transpose)
    axes = [np.arange(size) for size in shape]
    if cut is not None:
        axes[cut.axis] = cut.indices(rank)
    local_shape = tuple(map(len, axes))
    if row_order is not None:
        axes[0] = np.where(axes[0] < 0, -1, row_order[axes[0]])
    result = aligned_empty(local_shape, checkpoint.dtype(key) if dtype is None else dtype)
    result[...] = 0
    column_runs = _runs(axes[1]) if len(axes) > 1 else [None]
    for rows, row_source in _runs(axes[0]):
        for columns in column_runs:
            target, source = (rows,), (row_source,)
            if columns is not None:
                target, source = (rows, columns[0]), (row_source, columns[1])
            result[target] = checkpoint.read(key, dtype=dtype, transpose=transpose, index=source[::-1] if transpose else source)
    return result


def _runs(indices):
    """[(slice of the result, slice of the source)] for each run of indices that follow each other; those of -1 are left out."""
    if not len(indices):
        return []
    borders = np.flatnonzero(np.diff(indices) != 1) + 1
    borders = [0, *borders.tolist(), len(indices)]
    return [
        (slice(begin, stop), slice(int(indices[begin]), int(indices[begin]) + stop - begin))
        for begin, stop in zip(borders[:-1], borders[1:], strict=True)
        if indices[begin] >= 0
    ]

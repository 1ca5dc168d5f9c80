"""Ops that move elements without changing them: reshape, transpose, broadcast, split, concat, slice, update, gather."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from poptransformer.errors import UserError
from poptransformer.graph import Spec, Value
from poptransformer.ops.op import define, emit, normal_axis, require


def _infer_reshape(x, shape):
    same_size = np.prod(shape, dtype=np.int64) == np.prod(x.shape, dtype=np.int64)
    require(same_size and min(shape, default=0) >= 0, f"cannot become {list(shape)}")
    return [Spec(shape, x.dtype)]


def _infer_transpose(x, axes):
    require(sorted(axes) == list(range(x.rank)), f"axes {list(axes)} do not name each of {x.rank} axes once")
    return [Spec([x.shape[axis] for axis in axes], x.dtype)]


def _infer_broadcast_to(x, shape):
    try:
        fits = np.broadcast_shapes(x.shape, shape) == tuple(shape)
    except ValueError:
        fits = False
    require(fits, f"cannot be broadcast to {list(shape)}")
    return [Spec(shape, x.dtype)]


def _infer_split(x, sizes, axis):
    require(0 <= axis < x.rank, f"has no axis {axis}")
    fits = sum(sizes) == x.shape[axis] and min(sizes, default=0) >= 0
    require(fits, f"axis {axis} has {x.shape[axis]} elements, the parts {list(sizes)}")
    return [Spec(x.shape[:axis] + (size,) + x.shape[axis + 1 :], x.dtype) for size in sizes]


def _infer_concat(*parts, axis):
    first = parts[0]
    require(0 <= axis < first.rank, f"has no axis {axis}")
    for part in parts:
        require(part.dtype == first.dtype, "parts differ in dtype")
        require(
            part.shape[:axis] + part.shape[axis + 1 :] == first.shape[:axis] + first.shape[axis + 1 :],
            f"parts differ in more than axis {axis}",
        )
    size = sum(part.shape[axis] for part in parts)
    return [Spec(first.shape[:axis] + (size,) + first.shape[axis + 1 :], first.dtype)]


def _infer_slice(x, start, stop, axis):
    require(0 <= axis < x.rank, f"has no axis {axis}")
    require(0 <= start <= stop <= x.shape[axis], f"axis {axis} has {x.shape[axis]} elements, wanted [{start}:{stop}]")
    return [Spec(x.shape[:axis] + (stop - start,) + x.shape[axis + 1 :], x.dtype)]


def _infer_dynamic_update(x, update, start, axis):
    require(0 <= axis < x.rank, f"has no axis {axis}")
    require(x.dtype == update.dtype, "the update differs in dtype")
    require(start.shape == () and start.dtype == np.int32, "start must be an int32 scalar")
    fits = update.rank == x.rank and update.shape[axis] <= x.shape[axis]
    fits = fits and all(u == n for i, (u, n) in enumerate(zip(update.shape, x.shape, strict=True)) if i != axis)
    require(fits, f"the update may differ in axis {axis} only, and be no longer there")
    return [x]


def _infer_gather(table, indices):
    require(table.rank >= 1, "wants a table with at least one axis")
    require(indices.dtype == np.int32, "indices must be int32")
    return [Spec(indices.shape + table.shape[1:], table.dtype)]


def _split_reference(x, sizes, axis):
    return np.split(x, np.cumsum(sizes)[:-1], axis)


def _slice_reference(x, start, stop, axis):
    return [x[(slice(None),) * axis + (slice(start, stop),)]]


def _dynamic_update_reference(x, update, start, axis):
    start = int(np.clip(start, 0, x.shape[axis] - update.shape[axis]))
    result = x.copy()
    result[(slice(None),) * axis + (slice(start, start + update.shape[axis]),)] = update
    return [result]


define("reshape", _infer_reshape, lambda x, shape: [x.reshape(shape)])
define("transpose", _infer_transpose, lambda x, axes: [x.transpose(axes)])
define("broadcast_to", _infer_broadcast_to, lambda x, shape: [np.broadcast_to(x, shape)])
define("split", _infer_split, _split_reference)
define("concat", _infer_concat, lambda *parts, axis: [np.concatenate(parts, axis)])
define("slice", _infer_slice, _slice_reference)
define("dynamic_update", _infer_dynamic_update, _dynamic_update_reference)
define("gather", _infer_gather, lambda table, indices: [table[indices]])


def reshape(x: Value, shape: Sequence[int]) -> Value:
    """x with the same elements in another shape; one size may be -1."""
    shape = list(shape)
    if shape.count(-1) == 1:
        rest = int(np.prod([size for size in shape if size != -1], dtype=np.int64))
        shape[shape.index(-1)] = int(np.prod(x.shape, dtype=np.int64)) // max(rest, 1)
    return emit("reshape", x, shape=tuple(shape))[0]


def transpose(x: Value, axes: Sequence[int]) -> Value:
    """x with its axes in the given order."""
    return emit("transpose", x, axes=tuple(axes))[0]


def broadcast_to(x: Value, shape: Sequence[int]) -> Value:
    """x repeated along axes of size 1 and new leading axes, to the given shape."""
    return emit("broadcast_to", x, shape=tuple(shape))[0]


def split(x: Value, sizes: Sequence[int], axis: int = -1) -> tuple[Value, ...]:
    """Cut x into parts of the given sizes along an axis."""
    return emit("split", x, sizes=tuple(sizes), axis=normal_axis(axis, x))


def concat(parts: Sequence[Value], axis: int = -1) -> Value:
    """Join values that differ in one axis only along that axis."""
    if not parts:
        raise UserError("concat needs at least one part")
    return emit("concat", *parts, axis=normal_axis(axis, parts[0]))[0]


def slice_axis(x: Value, start: int, stop: int, axis: int = -1) -> Value:
    """x[..., start:stop, ...] along an axis."""
    return emit("slice", x, start=start, stop=stop, axis=normal_axis(axis, x))[0]


def dynamic_update(x: Value, update: Value, start: Value, axis: int) -> Value:
    """x with the elements from `start` on along an axis replaced by `update`.

    Args:
      start: int32 scalar, known when the graph runs; moved inside so that the whole update fits.
    """
    return emit("dynamic_update", x, update, start, axis=normal_axis(axis, x))[0]


def gather(table: Value, indices: Value) -> Value:
    """Rows of a table: table [V, ...], indices [...] int32 in 0 .. V - 1 -> [..., ...]. Used for embeddings."""
    return emit("gather", table, indices)[0]

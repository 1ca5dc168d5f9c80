"""Reductions along one axis: sum, max, argmax, any. The axis is dropped."""

from __future__ import annotations

import numpy as np

from poptransformer.graph import Spec, Value
from poptransformer.ops.op import define, emit, is_float, normal_axis, require, widen


def _infer_reduce(x, axis):
    require(0 <= axis < x.rank, f"has no axis {axis}")
    require(x.shape[axis] > 0, "cannot reduce an axis without elements")
    return [Spec(x.shape[:axis] + x.shape[axis + 1 :], x.dtype)]


def _infer_sum(x, axis):
    require(x.dtype != bool, "wants numbers, not bool; cast to int32 to count")
    return _infer_reduce(x, axis)


def _infer_any(x, axis):
    require(x.dtype == bool, "wants bool")
    return _infer_reduce(x, axis)


def _infer_argmax(x, axis):
    return [Spec(_infer_reduce(x, axis)[0].shape, np.int32)]


def reduce_sum_reference(x, axis):
    """Sum along an axis; 16-bit floats are added up in float32, integers wrap around."""
    return [np.sum(widen(x) if is_float(x.dtype) else x, axis, dtype=None if is_float(x.dtype) else x.dtype).astype(x.dtype)]


define("reduce_sum", _infer_sum, reduce_sum_reference)
define("reduce_max", _infer_reduce, lambda x, axis: [np.max(x, axis)])
define("reduce_any", _infer_any, lambda x, axis: [np.any(x, axis)])
define("argmax", _infer_argmax, lambda x, axis: [np.argmax(x, axis).astype(np.int32)])


def reduce_sum(x: Value, axis: int = -1) -> Value:
    """Sum along an axis, in the dtype of x; 16-bit floats are added up in float32."""
    return emit("reduce_sum", x, axis=normal_axis(axis, x))[0]


def reduce_max(x: Value, axis: int = -1) -> Value:
    """Largest element along an axis."""
    return emit("reduce_max", x, axis=normal_axis(axis, x))[0]


def reduce_any(x: Value, axis: int = -1) -> Value:
    """Whether any element along an axis of a bool value is true."""
    return emit("reduce_any", x, axis=normal_axis(axis, x))[0]


def argmax(x: Value, axis: int = -1) -> Value:
    """Index of the largest element along an axis, int32; the first of equals."""
    return emit("argmax", x, axis=normal_axis(axis, x))[0]

"""Ops between tensor-parallel ranks: all_reduce, all_gather, rank_index.

A graph is what one rank computes. The references of these ops take and give one array for all ranks: each operand has a leading
axis over ranks.
"""

from __future__ import annotations

import numpy as np

from poptransformer.graph import Spec, Value
from poptransformer.ops.op import define, emit, is_float, require, widen

COLLECTIVES = ("all_reduce", "all_gather", "rank_index")


def _infer_all_reduce(x, world_size):
    require(world_size >= 1, "world_size must be at least 1")
    require(is_float(x.dtype) or x.dtype == np.int32, "wants a floating dtype or int32")
    return [x]


def _infer_all_gather(x, axis, world_size):
    require(world_size >= 1, "world_size must be at least 1")
    require(0 <= axis < x.rank, f"x has no axis {axis}")
    shape = list(x.shape)
    shape[axis] *= world_size
    return [Spec(tuple(shape), x.dtype)]


def _infer_rank_index(world_size):
    require(world_size >= 1, "world_size must be at least 1")
    return [Spec((), np.dtype(np.int32))]


def all_reduce_reference(x, world_size):
    """x: [R, ...], one entry a rank -> [R, ...], each the sum of all."""
    total = (widen(x) if is_float(x.dtype) else x).sum(0, keepdims=True).astype(x.dtype)
    return [np.broadcast_to(total, x.shape)]


def all_gather_reference(x, axis, world_size):
    """x: [R, ...], one entry a rank -> [R, ...], each all of them along the axis (counted without the ranks')."""
    whole = np.concatenate(list(x), axis=axis)
    return [np.broadcast_to(whole, (len(x), *whole.shape))]


def rank_index_reference(world_size):
    """-> [R] int32."""
    return [np.arange(world_size, dtype=np.int32)]


define("all_reduce", _infer_all_reduce, all_reduce_reference)
define("all_gather", _infer_all_gather, all_gather_reference)
define("rank_index", _infer_rank_index, rank_index_reference)


def all_reduce(x: Value, world_size: int) -> Value:
    """Add up what the ranks have; every rank gets the sum. x: any shape, floating or int32."""
    return emit("all_reduce", x, world_size=world_size)[0]


def all_gather(x: Value, axis: int, world_size: int) -> Value:
    """Put the ranks' parts one after the other along an axis; every rank gets all: size * R there."""
    return emit("all_gather", x, axis=axis + x.rank if axis < 0 else axis, world_size=world_size)[0]


def rank_index(like: Value, world_size: int) -> Value:
    """The number of the rank that runs, a scalar int32 in 0 .. R - 1, in the graph that `like` belongs to."""
    return like.graph.add_node("rank_index", (), _infer_rank_index(world_size), {"world_size": world_size})[0]

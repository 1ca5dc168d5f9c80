"""PopART lowerings of the collectives: ranks are replicas of one program."""

import numpy as np

from poptransformer.backends.popart.lowering import lowering
from poptransformer.backends.popart.tensors import Tensor, Weight
from poptransformer.graph import Spec

RANK = "rank"  # initializer that holds a replica's own number


@lowering("all_reduce")
def all_reduce(emitter, x, world_size):
    wide = emitter.widen(x) if x.dtype == np.float16 else x
    return emitter.cast(emitter.all_reduce(wide), x.dtype)


@lowering("all_gather")
def all_gather(emitter, x, axis, world_size):
    parts = emitter.all_gather(x)  # [R, ...]
    order = [*range(1, axis + 1), 0, *range(axis + 1, parts.rank)]
    shape = (*x.shape[:axis], world_size * x.shape[axis], *x.shape[axis + 1 :])
    return emitter.reshape(emitter.transpose(parts, order), shape)


@lowering("rank_index")
def rank_index(emitter, world_size):
    """The host gives each replica its number as a weight of its own: no op tells it."""
    weight = Weight(RANK, (1,), np.dtype(np.int32), lambda rank: np.int32([rank]), is_cut=True)
    return emitter.reshape(Tensor("", Spec((1,), np.int32), weight=weight), ())

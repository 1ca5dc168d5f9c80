"""XLA lowerings of the ops between ranks; graphs that have them are traced inside shard_map over the mesh axis RANKS."""

from jax import lax

from poptransformer.backends.xla.device_group import RANKS
from poptransformer.backends.xla.lowering import lowering


@lowering("all_reduce")
def all_reduce(context, x, world_size):
    return lax.psum(x, RANKS)


@lowering("all_gather")
def all_gather(context, x, axis, world_size):
    return lax.all_gather(x, RANKS, axis=axis, tiled=True)


@lowering("rank_index")
def rank_index(context, world_size):
    return lax.axis_index(RANKS)

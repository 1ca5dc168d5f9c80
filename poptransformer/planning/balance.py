"""Which layers go to which stage, so that the fullest stage holds as little as can be."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from poptransformer.errors import UserError


def balance(layer_bytes: Sequence[int], first_bytes: int, last_bytes: int, num_stages: int) -> list[int]:
    """Cut a row of layers into stages so that the largest stage is as small as possible.

    Of the cuts with the same largest stage, one with the least sum of squares is taken, so that the other stages are even too.
    A stage may be left without layers, as the first one is where the embedding alone is more than the others' share.

    Args:
      layer_bytes: bytes of each layer, in order.
      first_bytes: what the first stage holds besides its layers: the embeddings.
      last_bytes: the same for the last stage: final norm and head; a tied embedding is in both, since both stages then hold
        it (in one stage it is there once, but there is only one cut then).
      num_stages: stages, at least 1.
    Returns: the number of layers of each stage, `num_stages` of them.
    Raises: UserError if num_stages is less than 1 or not a whole number.
    """
    if isinstance(num_stages, bool) or not isinstance(num_stages, int) or num_stages < 1:
        raise UserError(f"num_stages={num_stages!r}: give a whole number of stages, 1 or more")
    up_to = [0, *itertools.accumulate(layer_bytes)]

    def load(stage, begin, end):
        first, last = stage == 0, stage == num_stages - 1
        return up_to[end] - up_to[begin] + first * first_bytes + last * last_bytes

    limit = _best(len(layer_bytes), num_stages, lambda so_far, *cut: max(so_far, load(*cut)))[0]

    def squares(so_far, *cut):
        bytes_here = load(*cut)
        return so_far + bytes_here**2 if bytes_here <= limit else None

    return _best(len(layer_bytes), num_stages, squares)[1]


def _best(num_layers, num_stages, cost):
    """(least cost, layers of each stage) by dynamic programming; cost(cost of the stages before, stage, begin, end), None: not
    allowed.
    """
    best = {0: (0, [])}  # layers in the stages so far -> least cost, cut
    for stage in range(num_stages):
        following = {}
        for end in range(num_layers + 1) if stage < num_stages - 1 else [num_layers]:
            costs = ((cost(so_far, stage, begin, end), begin) for begin, (so_far, _) in best.items() if begin <= end)
            allowed = [pair for pair in costs if pair[0] is not None]
            if allowed:
                least, begin = min(allowed)
                following[end] = least, [*best[begin][1], end - begin]
        best = following
    return best[num_layers]

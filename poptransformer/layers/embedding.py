"""Embedding: a table of vectors, one for each token or position."""

from __future__ import annotations

from poptransformer import ops
from poptransformer.layers.base_layer import BaseLayer


class Embedding(BaseLayer):
    """Looks ids up in a table.

    Checkpoint keys: `weight: [num_embeddings, hidden_size]`.

    Args:
      shard: "vocab" cuts the table's rows over the ranks, None keeps it whole.
      is_tied: whether the head shares the table, which is then packed as matrices are.
    """

    def __init__(self, name, num_embeddings, hidden_size, shard=None, is_tied=False):
        super().__init__(name)
        cut = self.even_cut(0, num_embeddings) if shard else None
        if is_tied:
            self.weight = self.matrix("weight", num_embeddings, hidden_size, cut, is_head=True)
        else:
            self.weight = self.parameter("weight", (num_embeddings, hidden_size), cut=cut)

    def forward(self, ids):
        """ids: [B, T] int32 -> [B, T, D]."""
        cut = self.weight.cut
        if cut is None:
            return self._look_up(ids)
        local = ids - ops.rank_index(ids, self.world_size) * cut.local_size
        is_here = ops.logical_and(local >= 0, local < cut.local_size)
        rows = self._look_up(ops.minimum(ops.maximum(local, 0), cut.local_size - 1))
        rows = ops.select(ops.reshape(is_here, (*ids.shape, 1)), rows, 0.0)
        return ops.all_reduce(rows, self.world_size)  # one rank has the row, the others have zeros: nothing is rounded

    def _look_up(self, ids):
        if self.weight.packing:
            return ops.packed_gather(ids.graph.parameter(self.weight), ids, self.weight.packing, self.dtype)
        return ops.gather(ids.graph.parameter(self.weight), ids)

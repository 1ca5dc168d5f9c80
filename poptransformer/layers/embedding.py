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
        if is_tied:
            self.weight = self.matrix("weight", num_embeddings, hidden_size, shard, is_head=True)
        else:
            self.weight = self.parameter("weight", (num_embeddings, hidden_size), shard=shard)

    def forward(self, ids):
        """ids: [B, T] int32 -> [B, T, D]."""
        if self.weight.packing:
            return ops.packed_gather(ids.graph.parameter(self.weight), ids, self.weight.packing, self.dtype)
        return ops.gather(ids.graph.parameter(self.weight), ids)

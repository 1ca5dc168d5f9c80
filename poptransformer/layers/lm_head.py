"""LMHead: hidden states to logits."""

from __future__ import annotations

import numpy as np

from poptransformer.graph import Parameter
from poptransformer.layers.base_layer import BaseLayer
from poptransformer.layers.linear import multiply


class LMHead(BaseLayer):
    """logits = x W^T, float32.

    Checkpoint keys: `weight: [vocab_size, hidden_size]`, or none where it is tied to the embedding.

    Args:
      tied: the embedding's Parameter to share, or None for a weight of its own.
    """

    def __init__(self, name, hidden_size, vocab_size, tied: Parameter | None = None):
        super().__init__(name)
        self.weight = tied or self.matrix("weight", vocab_size, hidden_size, shard="vocab")

    def forward(self, x):
        """x: [B, T, D] -> [B, T, V] float32."""
        return multiply(x, self.weight, out_dtype=np.float32)

"""LMHead: hidden states to logits."""

from __future__ import annotations

import numpy as np

from poptransformer import ops
from poptransformer.graph import Parameter
from poptransformer.layers.base_layer import BaseLayer
from poptransformer.layers.linear import multiply


class LMHead(BaseLayer):
    """logits = x W^T, or x W^T + b, float32.

    Checkpoint keys: `weight: [vocab_size, hidden_size]`, or none where it is tied to the embedding; `bias: [vocab_size]`.

    Args:
      tied: the embedding's Parameter to share, or None for a weight of its own.
      bias: whether there is one.
    """

    def __init__(self, name, hidden_size, vocab_size, tied: Parameter | None = None, bias=False):
        super().__init__(name)
        self.vocab_size = vocab_size
        cut = tied.cut if tied else self.even_cut(0, vocab_size)
        self.weight = tied or self.matrix("weight", vocab_size, hidden_size, cut, is_head=True)
        self.bias = self.parameter("bias", (vocab_size,), cut=cut, init="zeros") if bias else None

    def forward(self, x):
        """x: [B, T, D] -> [B, T, V] float32."""
        bias = x.graph.parameter(self.bias) if self.bias else None
        logits = multiply(x, self.weight, bias, out_dtype=np.float32)
        if self.weight.cut is None:
            return logits
        # Rows that fill the last ranks up are no tokens: they end here.
        return ops.slice_axis(ops.all_gather(logits, -1, self.world_size), 0, self.vocab_size)

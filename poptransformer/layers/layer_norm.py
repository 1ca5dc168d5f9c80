"""LayerNorm: the layer around the op layer_norm."""

from __future__ import annotations

import numpy as np

from poptransformer import ops
from poptransformer.layers.base_layer import BaseLayer


class LayerNorm(BaseLayer):
    """Layer normalisation of the last axis.

    Checkpoint keys: `weight: [hidden_size]`, `bias: [hidden_size]`; each rank holds both.

    Args:
      has_weights: False normalises alone, and the checkpoint has nothing for this layer.
    """

    def __init__(self, name, hidden_size, eps, has_weights=True):
        super().__init__(name)
        self.eps = eps
        self.weight = self.parameter("weight", (hidden_size,), init="ones") if has_weights else None
        self.bias = self.parameter("bias", (hidden_size,), init="zeros") if has_weights else None

    def forward(self, x):
        """x: [..., D] -> [..., D]."""
        if self.weight is None:
            weight, bias = (x.graph.constant(fill(x.shape[-1], self.dtype)) for fill in (np.ones, np.zeros))
        else:
            weight, bias = x.graph.parameter(self.weight), x.graph.parameter(self.bias)
        return ops.layer_norm(x, weight, bias, self.eps)

"""LayerNorm: the layer around the op layer_norm."""

from __future__ import annotations

from poptransformer import ops
from poptransformer.layers.base_layer import BaseLayer


class LayerNorm(BaseLayer):
    """Layer normalisation of the last axis.

    Checkpoint keys: `weight: [hidden_size]`, `bias: [hidden_size]`; each rank holds both.
    """

    def __init__(self, name, hidden_size, eps):
        super().__init__(name)
        self.eps = eps
        self.weight = self.parameter("weight", (hidden_size,), init="ones")
        self.bias = self.parameter("bias", (hidden_size,), init="zeros")

    def forward(self, x):
        """x: [..., D] -> [..., D]."""
        return ops.layer_norm(x, x.graph.parameter(self.weight), x.graph.parameter(self.bias), self.eps)

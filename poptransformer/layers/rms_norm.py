"""RMSNorm: the layer around the op rms_norm."""

from __future__ import annotations

from poptransformer import ops
from poptransformer.layers.base_layer import BaseLayer


class RMSNorm(BaseLayer):
    """Root-mean-square normalisation of the last axis.

    Checkpoint keys: `weight: [hidden_size]`; each rank holds it whole.
    """

    def __init__(self, name, hidden_size, eps):
        super().__init__(name)
        self.eps = eps
        self.weight = self.parameter("weight", (hidden_size,), init="ones")

    def forward(self, x):
        """x: [..., D] -> [..., D]."""
        return ops.rms_norm(x, x.graph.parameter(self.weight), self.eps)

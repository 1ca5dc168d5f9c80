"""RMSNorm: the layer around the op rms_norm."""

from __future__ import annotations

import numpy as np

from poptransformer import ops
from poptransformer.layers.base_layer import BaseLayer


class RMSNorm(BaseLayer):
    """Root-mean-square normalisation of the last axis.

    Checkpoint keys: `weight: [hidden_size]`; each rank holds it whole.

    Args:
      is_wide: whether the weight is float32 and the result is rounded once, after it (Gemma), rather than before as well.
    """

    def __init__(self, name, hidden_size, eps, is_wide=False):
        super().__init__(name)
        self.eps, self.is_wide = eps, is_wide
        self.weight = self.parameter("weight", (hidden_size,), np.float32 if is_wide else None, init="ones")

    def forward(self, x):
        """x: [..., D] -> [..., D]."""
        wide = ops.cast(x, np.float32) if self.is_wide else x
        return ops.cast(ops.rms_norm(wide, x.graph.parameter(self.weight), self.eps), x.dtype)

"""Linear: a weight matrix, and the word that says how it is cut over ranks."""

from __future__ import annotations

import numpy as np

from poptransformer import ops
from poptransformer.errors import UserError
from poptransformer.graph import Parameter, Value
from poptransformer.layers.base_layer import BaseLayer

SHARDS = ("column", "row", None)


def multiply(x: Value, weight: Parameter, bias: Value | None = None, out_dtype=None) -> Value:
    """x W^T + b for a matrix that is packed or not."""
    if weight.packing:
        return ops.packed_linear(x, x.graph.parameter(weight), weight.packing, bias, out_dtype)
    return ops.linear(x, x.graph.parameter(weight), bias, out_dtype)


class Linear(BaseLayer):
    """y = x W^T + b.

    Checkpoint keys: `weight: [out_features, in_features]`, `bias: [out_features]`.

    Args:
      name: full name.
      in_features, out_features: sizes of the whole weight.
      bias: whether there is one.
      shard: "column" cuts out_features over the ranks, "row" cuts in_features and adds the ranks' results up; None keeps
        the whole weight on each rank.
      cut: the Cut where parts are not equal (heads, fused projections); None cuts into equal parts.
    """

    def __init__(self, name, in_features, out_features, bias=True, shard=None, cut=None):
        super().__init__(name)
        if shard not in SHARDS:
            raise UserError(f"{name}: shard={shard!r}; choose one of {', '.join(map(str, SHARDS))}")
        if shard is not None and cut is None:
            cut = self.even_cut(0, out_features) if shard == "column" else self.even_cut(1, in_features)
        self.weight = self.matrix("weight", out_features, in_features, cut)
        bias_cut = cut if shard == "column" else None
        self.bias = self.parameter("bias", (out_features,), cut=bias_cut, init="zeros") if bias else None
        self.adds_up = shard == "row" and self.world_size > 1

    def forward(self, x):
        """x: [..., in_features of this rank] -> [..., out_features of this rank]."""
        bias = x.graph.parameter(self.bias) if self.bias else None
        if not self.adds_up:
            return multiply(x, self.weight, bias)
        # The ranks' parts are rounded once, after they are added up, and the bias is added once.
        y = ops.all_reduce(multiply(x, self.weight, out_dtype=np.float32), self.world_size)
        if bias is not None:
            y = y + ops.cast(bias, np.float32)
        return ops.cast(y, self.dtype)

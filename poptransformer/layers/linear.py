"""Linear: a weight matrix, and the word that says how it is cut over ranks."""

from __future__ import annotations

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
      in_features, out_features: sizes on one device.
      bias: whether there is one.
      shard: "column" cuts out_features over the ranks, "row" cuts in_features and adds the ranks' results up; None keeps
        the whole weight on each rank.
    """

    def __init__(self, name, in_features, out_features, bias=True, shard=None):
        super().__init__(name)
        if shard not in SHARDS:
            raise UserError(f"{name}: shard={shard!r}; choose one of {', '.join(map(str, SHARDS))}")
        self.weight = self.matrix("weight", out_features, in_features, shard)
        bias_shard = shard if shard == "column" else None
        self.bias = self.parameter("bias", (out_features,), shard=bias_shard, init="zeros") if bias else None

    def forward(self, x):
        """x: [..., in_features] -> [..., out_features]."""
        bias = x.graph.parameter(self.bias) if self.bias else None
        return multiply(x, self.weight, bias)

"""MLP: up, activation, down."""

from __future__ import annotations

from poptransformer.layers.activation import activation
from poptransformer.layers.base_layer import BaseLayer
from poptransformer.layers.linear import Linear


class MLP(BaseLayer):
    """down(activation(up(x))).

    Checkpoint keys: those of its two Linear layers, under the names given.

    Args:
      activation_name: as in the Hugging Face config.
      up, down: names of the two projections in the checkpoint.
    """

    def __init__(self, name, hidden_size, intermediate_size, activation_name, up="up_proj", down="down_proj", bias=True):
        super().__init__(name)
        self.up = Linear(f"{name}.{up}", hidden_size, intermediate_size, bias, shard="column")
        self.activation = activation(activation_name)
        self.down = Linear(f"{name}.{down}", intermediate_size, hidden_size, bias, shard="row")

    def forward(self, x):
        """x: [B, T, D] -> [B, T, D]."""
        return self.down(self.activation(self.up(x)))

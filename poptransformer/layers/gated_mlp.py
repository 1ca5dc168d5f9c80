"""GatedMLP: up, times an activated gate, down."""

from __future__ import annotations

from poptransformer.layers.activation import activation
from poptransformer.layers.base_layer import BaseLayer
from poptransformer.layers.linear import Linear


class GatedMLP(BaseLayer):
    """down(activation(gate(x)) * up(x)); SwiGLU where the activation is silu.

    Checkpoint keys: those of its three Linear layers, under the names given.

    Args:
      activation_name: as in the Hugging Face config.
      gate, up, down: names of the projections in the checkpoint.
    Source: Shazeer 2020, arXiv:2002.05202.
    """

    def __init__(
        self, name, hidden_size, intermediate_size, activation_name,
        gate="gate_proj", up="up_proj", down="down_proj", bias=True,
    ):  # fmt: skip
        super().__init__(name)
        self.gate = Linear(f"{name}.{gate}", hidden_size, intermediate_size, bias, shard="column")
        self.activation = activation(activation_name)
        self.up = Linear(f"{name}.{up}", hidden_size, intermediate_size, bias, shard="column")
        self.down = Linear(f"{name}.{down}", intermediate_size, hidden_size, bias, shard="row")

    def forward(self, x):
        """x: [B, T, D] -> [B, T, D]."""
        return self.down(self.activation(self.gate(x)) * self.up(x))

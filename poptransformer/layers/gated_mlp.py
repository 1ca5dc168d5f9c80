"""GatedMLP: up, times an activated gate, down."""

from __future__ import annotations

from poptransformer import ops
from poptransformer.layers.activation import activation
from poptransformer.layers.base_layer import BaseLayer
from poptransformer.layers.linear import Linear


class GatedMLP(BaseLayer):
    """down(activation(gate(x)) * up(x)); SwiGLU where the activation is silu.

    Checkpoint keys: those of its Linear layers, under the names given; a fused projection holds the gate's rows, then those of
    up: `[2 * F, D]`.

    Args:
      activation_name: as in the Hugging Face config.
      gate, up, down: names of the projections in the checkpoint.
      gate_up: name of the projection that gate and up are fused to, or None.
    Source: Shazeer 2020, arXiv:2002.05202.
    """

    def __init__(
        self, name, hidden_size, intermediate_size, activation_name,
        gate="gate_proj", up="up_proj", down="down_proj", bias=True, gate_up=None,
    ):  # fmt: skip
        super().__init__(name)
        sizes = {gate: intermediate_size, up: intermediate_size} if gate_up is None else {gate_up: 2 * intermediate_size}
        self.gate_up = [Linear(f"{name}.{key}", hidden_size, size, bias, shard="column") for key, size in sizes.items()]
        self.activation = activation(activation_name)
        self.down = Linear(f"{name}.{down}", intermediate_size, hidden_size, bias, shard="row")
        self.intermediate_size = intermediate_size

    def forward(self, x):
        """x: [B, T, D] -> [B, T, D]."""
        parts = [projection(x) for projection in self.gate_up]
        gate, up = parts if len(parts) == 2 else ops.split(parts[0], [self.intermediate_size] * 2)
        return self.down(self.activation(gate) * up)

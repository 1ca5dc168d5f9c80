"""GatedMLP: up, times an activated gate, down."""

from __future__ import annotations

from poptransformer import ops
from poptransformer.layers.activation import activation
from poptransformer.layers.base_layer import BaseLayer
from poptransformer.layers.linear import Linear
from poptransformer.parallel import joined_cut


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
        pieces = self.even_pieces(intermediate_size)
        self.local_size = pieces[0].size if self.world_size > 1 else intermediate_size
        if gate_up is None:
            sizes, cut = {gate: intermediate_size, up: intermediate_size}, None
        else:
            sizes = {gate_up: 2 * intermediate_size}
            cut = joined_cut(0, [intermediate_size] * 2, [pieces] * 2) if self.world_size > 1 else None
        self.gate_up = [Linear(f"{name}.{key}", hidden_size, size, bias, "column", cut) for key, size in sizes.items()]
        self.activation = activation(activation_name)
        self.down = Linear(f"{name}.{down}", intermediate_size, hidden_size, bias, shard="row")

    def forward(self, x):
        """x: [B, T, D] -> [B, T, D]."""
        parts = [projection(x) for projection in self.gate_up]
        gate, up = parts if len(parts) == 2 else ops.split(parts[0], [self.local_size] * 2)
        return self.down(self.activation(gate) * up)

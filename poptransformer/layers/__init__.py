"""Layers that models are made of."""

from poptransformer.layers.activation import activation
from poptransformer.layers.attention import Attention
from poptransformer.layers.base_layer import BaseLayer
from poptransformer.layers.embedding import Embedding
from poptransformer.layers.gated_mlp import GatedMLP
from poptransformer.layers.layer_norm import LayerNorm
from poptransformer.layers.linear import Linear
from poptransformer.layers.lm_head import LMHead
from poptransformer.layers.mlp import MLP
from poptransformer.layers.rms_norm import RMSNorm
from poptransformer.layers.rope import Rope

__all__ = [
    "MLP", "Attention", "BaseLayer", "Embedding", "GatedMLP", "LMHead", "LayerNorm", "Linear", "RMSNorm", "Rope", "activation",
]  # fmt: skip

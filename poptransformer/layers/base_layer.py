"""BaseLayer: a name, parameters under that name, and a call that puts the layer's name on the nodes it adds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from poptransformer.graph import Parameter, Value
from poptransformer.packing import Packing
from poptransformer.register import REGISTER

HEAD_KIND = "int8"


class BaseLayer:
    """Base of all layers. A layer reads REGISTER in its constructor, makes its parameters there, and says in `forward`
    what it computes, with `poptransformer.ops` on Values.

    Args:
      name: full name, as in the checkpoint: ``transformer.h.0.attn``.
    """

    def __init__(self, name: str):
        self.name = name
        self.dtype = REGISTER.dtype
        self.weight_dtype = REGISTER.weight_dtype
        self.packing = REGISTER.packing

    def __call__(self, x: Value, *args, **kwargs):
        with x.graph.scope(self.name):
            return self.forward(x, *args, **kwargs)

    def forward(self, x: Value, *args, **kwargs):
        """The layer's equation."""
        raise NotImplementedError(type(self).__name__)

    def parameter(self, suffix: str, shape, dtype=None, shard=None, init="normal") -> Parameter:
        """Make a parameter called `<layer>.<suffix>`; dtype defaults to that of the activations."""
        return Parameter(f"{self.name}.{suffix}", tuple(shape), dtype or self.dtype, shard, init=init)

    def matrix(self, suffix: str, out_features: int, in_features: int, shard=None, is_head=False) -> Parameter:
        """Make a matrix [out_features, in_features] called `<layer>.<suffix>`, packed where the precision says so.

        The head's is always int8: in 4 bits it alone would cost more accuracy than all other matrices, and fp8 has as many bits
        but only 3 of them for the fraction.
        """
        if self.packing is None:
            return self.parameter(suffix, (out_features, in_features), self.weight_dtype, shard)
        kind, group_size = self.packing
        packing = Packing(HEAD_KIND if is_head else kind, group_size, out_features, in_features)
        return Parameter(f"{self.name}.{suffix}", packing.shape, np.dtype(np.uint8), shard, packing=packing)

    def parameters(self) -> Iterator[Parameter]:
        """All parameters of the layer and of the layers in its attributes (and in lists of them), each once."""
        seen = set()
        for item in self._items():
            for parameter in item.parameters() if isinstance(item, BaseLayer) else [item]:
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter

    def _items(self):
        for attribute in vars(self).values():
            for item in attribute if isinstance(attribute, (list, tuple)) else [attribute]:
                if isinstance(item, (BaseLayer, Parameter)):
                    yield item

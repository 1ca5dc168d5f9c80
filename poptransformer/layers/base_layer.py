"""BaseLayer: a name, parameters under that name, and a call that puts the layer's name on the nodes it adds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from poptransformer.graph import Parameter, Value
from poptransformer.packing import UNIT, WHOLE_ROW, Packing
from poptransformer.parallel import Cut, even_cut, even_pieces
from poptransformer.register import REGISTER

HEAD_KIND = "int8"
HEAD_GROUP_SIZE = 32  # where the other matrices' kind has none to choose


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
        self.world_size = REGISTER.world_size
        self.stage = None  # the pipeline stage that it runs on; None: that of what it is given

    def __call__(self, x: Value, *args, **kwargs):
        stage = contextlib.nullcontext() if self.stage is None else x.graph.stage(self.stage)
        with x.graph.scope(self.name), stage:
            return self.forward(x, *args, **kwargs)

    def forward(self, x: Value, *args, **kwargs):
        """The layer's equation."""
        raise NotImplementedError(type(self).__name__)

    def parameter(self, suffix: str, shape, dtype=None, cut: Cut | None = None, init="normal") -> Parameter:
        """Make a parameter called `<layer>.<suffix>`; dtype defaults to that of the activations.

        Args:
          shape: of the whole weight.
          cut: how the ranks share it; None: each has it whole.
        """
        return Parameter(f"{self.name}.{suffix}", _local(shape, cut), dtype or self.dtype, cut, init=init)

    def matrix(self, suffix: str, out_features: int, in_features: int, cut: Cut | None = None, is_head=False) -> Parameter:
        """Make a matrix [out_features, in_features] called `<layer>.<suffix>`, packed where the precision says so.

        The head's is always int8: in 4 bits it alone would cost more accuracy than all other matrices, and fp8 has as many bits
        but only 3 of them for the fraction. Each rank's part is packed by itself, so no group of weights crosses a cut.
        """
        if self.packing is None:
            return self.parameter(suffix, (out_features, in_features), self.weight_dtype, cut)
        kind, group_size = self.packing
        if is_head:
            kind, group_size = HEAD_KIND, HEAD_GROUP_SIZE if kind == "fp8" else group_size
        packing = Packing(kind, group_size, *_local((out_features, in_features), cut))
        return Parameter(f"{self.name}.{suffix}", packing.shape, np.dtype(np.uint8), cut, packing=packing)

    def even_pieces(self, size: int):
        """Equal parts of an axis for the ranks, whose borders are those of groups of packed weights."""
        return even_pieces(size, self.world_size, self._group())

    def even_cut(self, axis: int, size: int) -> Cut | None:
        """Cut an axis into equal parts; None where there is one rank."""
        return even_cut(axis, size, self.world_size, self._group()) if self.world_size > 1 else None

    def _group(self):
        if self.packing is None:
            return 1
        return UNIT if self.packing[1] == WHOLE_ROW else self.packing[1]

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


def _local(shape, cut):
    return tuple(shape) if cut is None else (*shape[: cut.axis], cut.local_size, *shape[cut.axis + 1 :])

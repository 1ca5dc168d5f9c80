"""What lowerings pass around: tensors of the ONNX graph that is being written, with static shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from poptransformer.graph import Spec

# TensorProto type numbers of the dtypes that reach an IPU; INT64 only as shapes, counts of TopK and trip counts of Loop.
ONNX_TYPES = {
    "float32": 1, "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "int32": 6, "int64": 7, "bool": 9, "float16": 10,
    "uint32": 12,
}  # fmt: skip


@dataclasses.dataclass(eq=False)
class Weight:
    """An initializer of the main graph, filled when the model is written.

    Attributes:
      name: id in the model.
      shape, dtype: as the graph sees it, on one replica.
      load: rank -> array of that shape; one rank's part.
      is_cut: whether each replica has a part of its own. The initializer then has a leading dimension of replicas.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    load: Callable[[int], np.ndarray]
    is_cut: bool = False

    def __post_init__(self):
        self.shape, self.dtype = tuple(self.shape), np.dtype(self.dtype)

    def stored_shape(self, num_replicas: int) -> tuple[int, ...]:
        """Shape of the initializer. One replica adds nothing: PopART takes a dimension off only where there are more."""
        return (num_replicas, *self.shape) if self.is_cut and num_replicas > 1 else self.shape

    def num_bytes(self, num_replicas: int) -> int:
        return int(np.prod(self.stored_shape(num_replicas), dtype=np.int64)) * self.dtype.itemsize


@dataclasses.dataclass(eq=False)
class Tensor:
    """A tensor with a name in the ONNX graph, or one that gets its name where it is first used.

    Attributes:
      name: id in the ONNX graph; "" for a constant, weight or state that no node has named yet.
      spec: shape and dtype.
      array: the values of a constant; None for all else. A Constant node is written in each graph that uses it.
      weight: the initializer it stands for, or None.
      is_zero_state: whether it is a state at the beginning of a run, which is zeros.
      is_stored_transposed: whether the initializer holds the matrix transposed; only products read such a weight.
    """

    name: str
    spec: Spec
    array: np.ndarray | None = None
    weight: Weight | None = None
    is_zero_state: bool = False
    is_stored_transposed: bool = False

    @property
    def shape(self):
        return self.spec.shape

    @property
    def dtype(self):
        return self.spec.dtype

    @property
    def rank(self):
        return len(self.spec.shape)

    def is_constant(self, number) -> bool:
        """Whether it is known, when the graph is written, that all elements are this number."""
        if self.is_zero_state:
            return number == 0
        return self.array is not None and bool(np.all(self.array == number))

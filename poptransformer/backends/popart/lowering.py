"""The table of PopART lowerings, and the walk over a graph that uses it.

A lowering is called as `lower(emitter, *tensors, **attributes)`, writes nodes and returns one Tensor or several.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from poptransformer.backends.popart.emitter import Emitter
from poptransformer.backends.popart.tensors import Tensor, Weight
from poptransformer.errors import UnsupportedError
from poptransformer.graph import Graph, Parameter, Value

LOWERINGS: dict[str, Callable] = {}
FAMILIES = (
    "attention", "collective", "elementwise", "layer_norm", "linear", "loop", "packed_linear", "reduce", "rms_norm", "rope",
    "sample", "shape", "softmax", "token_shift", "wkv",
)  # fmt: skip


def lowering(name: str):
    """Decorator that enters a function into the table under an op's name."""

    def enter(function):
        assert name not in LOWERINGS, f"op {name!r} has two PopART lowerings"
        LOWERINGS[name] = function
        return function

    return enter


def load_families() -> None:
    """Import the lowering files, each of which enters its ops into LOWERINGS."""
    for family in FAMILIES:
        importlib.import_module(f"poptransformer.backends.popart.{family}")


class Walk:
    """Writes a graph's nodes, those of loop bodies included.

    Args:
      graph: the outermost graph.
      load: Parameter, rank -> array; reads one rank's part of a weight.
      inputs: tensors of the graph's inputs by name.
    """

    def __init__(self, graph: Graph, load: Callable[[Parameter, int], np.ndarray], inputs: Mapping[str, Tensor]):
        self.graph = graph
        self.values: dict[Value, Tensor] = {}
        for value, array in graph.constants.items():
            self.values[value] = Tensor("", value.spec, array=array)
        for _, value in graph.states.values():
            self.values[value] = Tensor("", value.spec, is_zero_state=True)
        readers = _readers(graph)
        for parameter, value in graph.parameters.values():
            self.values[value] = parameter_tensor(parameter, load, readers.get(value, ()))
        for name, value in graph.inputs.items():
            self.values[value] = inputs[name]

    def write(self, emitter: Emitter) -> list[Tensor]:
        """Write all nodes of the graph; gives the tensors of its outputs."""
        emitter.root.evaluate = self.evaluate
        return self.evaluate(emitter, self.graph)

    def evaluate(self, emitter: Emitter, graph: Graph, inputs: Sequence[Tensor] = ()) -> list[Tensor]:
        """Write a graph's nodes with an emitter; `inputs` are those of a loop's body in their order."""
        if graph.parent is not None:
            self.values.update(zip(graph.inputs.values(), inputs, strict=True))
        for node in graph.nodes:
            tensors = [None if value is None else self.values[value] for value in node.inputs]
            with emitter.at(node.scope, node.stage):
                if node.op not in LOWERINGS:
                    raise UnsupportedError(f"{node.scope or graph.name}: backend popart has no lowering of {node.op!r}")
                results = LOWERINGS[node.op](emitter, *tensors, **node.attributes)
            results = results if isinstance(results, (list, tuple)) else [results]
            for value, tensor in zip(node.outputs, results, strict=True):
                assert tensor.spec == value.spec, f"{node.scope}: {node.op} gave {tensor.spec}, not {value.spec}"
                self.values[value] = tensor
        return [self.values[value] for value in graph.outputs.values()]


def parameter_tensor(parameter: Parameter, load, readers) -> Tensor:
    """A parameter as the tensor that lowerings get.

    A matrix that nothing but products reads is stored as they want it, [in_features, out_features]: a Transpose on the device
    would be folded into a second copy, or be done in every step.
    """
    is_cut = getattr(parameter, "cut", None) is not None

    def read(rank):
        return load(parameter, rank)

    weight = Weight(parameter.name, parameter.shape, parameter.dtype, read, is_cut)
    if parameter.packing is None and readers and all(reader == ("linear", 1) for reader in readers):
        weight = Weight(parameter.name, parameter.shape[::-1], parameter.dtype, lambda rank: read(rank).T, is_cut)
        return Tensor("", parameter.spec, weight=weight, is_stored_transposed=True)
    return Tensor("", parameter.spec, weight=weight)


def _readers(graph: Graph) -> dict[Value, set[tuple[str, int]]]:
    """For each value the (op, place among its inputs) that read it."""
    readers: dict[Value, set] = {}
    for node in graph.walk():
        for place, value in enumerate(node.inputs):
            if value is not None:
                readers.setdefault(value, set()).add((node.op, place))
    for inner in _graphs(graph):
        for value in (*inner.outputs.values(), *inner.state_updates.values()):
            readers.setdefault(value, set()).add(("output", 0))
    return readers


def _graphs(graph):
    yield graph
    for node in graph.walk():
        yield from (attribute for attribute in node.attributes.values() if isinstance(attribute, Graph))

"""Types of all tensors, before anything runs: each node is computed once on zeros, and the node rules look at it first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from popart_contract.standin import dtypes
from popart_contract.standin.binding import NotModelled
from popart_contract.standin.errors import popart_runtime_error
from popart_contract.standin.facts import operator, registered_version
from popart_contract.standin.flow import describe
from popart_contract.standin.kernels import COLLECTIVES, compute
from popart_contract.standin.rules import NODE_RULES


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """What is known of a tensor when a model is loaded.

    Attributes:
      dtype: PopART's name of its type.
      shape: sizes.
      array: its value where it is a constant.
      graph_path: of the graph that it was made in.
    """

    dtype: str
    shape: tuple[int, ...]
    array: np.ndarray | None = None
    graph_path: str = ""

    def like(self):
        """An array of this type: the value, or zeros."""
        return np.zeros(self.shape, dtypes.NUMPY[self.dtype]) if self.array is None else self.array

    def __str__(self):
        return describe(self.dtype, self.shape)


@dataclasses.dataclass(eq=False)
class TypedNode:
    """A node with the types of its inputs, for rules, and what kernels read of it.

    Attributes:
      proto, kind, domain, attributes, place: of the node.
      version: the registered version that PopART takes.
      opset: of its domain.
      known: the facts of that version.
      inputs: their types; None for one that is left out.
      body_results: types that a Loop's body returns, once it has been typed.
      constant: value of a Constant.
      evaluator: onnx's own implementation, made when it is first needed.
      bodies: the typed graphs of its attributes.
    """

    proto: object
    kind: str
    domain: str
    version: int
    opset: int
    attributes: dict
    known: dict
    place: str
    graph_path: str
    is_body: bool
    is_3_2: bool
    inputs: list[Tensor | None] = ()
    body_results: list[Tensor] = ()
    constant: np.ndarray | None = None
    evaluator: object = None
    bodies: list = ()


@dataclasses.dataclass(eq=False)
class TypedGraph:
    """Nodes in order, with the names of what goes in and out."""

    nodes: list[TypedNode]
    inputs: list[str]
    outputs: list[str]
    types: dict[str, Tensor]


def type_graph(model, view, given: dict[str, Tensor], report: Callable, constant_of: Callable) -> TypedGraph | None:
    """Type a graph.

    Args:
      given: types of its inputs and of what it sees from around it.
      report: (rule, text), called for each problem.
      constant_of: TensorProto -> array.
    Returns: None after a problem that leaves types unknown.
    """
    types, nodes = dict(given), []
    for item in view.nodes:
        version = registered_version(item.domain, item.kind, model.opsets[item.domain])
        node = TypedNode(
            item.proto, item.kind, item.domain, version or 1, model.opsets[item.domain], item.attributes,
            operator(item.domain, item.kind, version) if version else {"dtypes": [], "attributes": {}},
            str(item), view.path, view.is_body, model.is_3_2,
            inputs=[types[name] if name else None for name in item.proto.input],
        )  # fmt: skip
        if not item.is_op:
            node.constant = constant_of(item.attributes["value"])
        if not _obeys(node, report):
            return None
        results = _results(model, item, node, types, report, constant_of)
        if results is None:
            return None
        nodes.append(node)
        types.update({name: result for name, result in zip(item.proto.output, results, strict=False) if name})
    inputs, outputs = ([entry.name for entry in entries] for entries in (view.proto.input, view.proto.output))
    return TypedGraph(nodes, inputs, outputs, types)


def _obeys(node, report):
    problems = [(name, text) for name, rule in NODE_RULES.items() for text in rule(node)]
    for name, text in problems:
        report(name, f"{node.place}: {text}")
    return not problems


def _results(model, item, node, types, report, constant_of):
    """Types of a node's outputs."""
    if node.kind in ("Loop", "Call") and item.bodies:
        return _body_results(model, item, node, types, report, constant_of)
    arrays = [tensor and tensor.like() for tensor in node.inputs]
    try:
        if (node.domain, node.kind) in COLLECTIVES:
            replicas = max(model.replicas, 1)
            results = [values[0] for values in COLLECTIVES[node.domain, node.kind](node, [arrays[0]] * replicas)]
        else:
            results = compute(node, arrays)
    except (NotModelled, popart_runtime_error):
        raise
    except Exception as error:
        given = ", ".join(map(str, node.inputs))
        report("fact_h_setup_gives_static_shapes", f"{node.place}({given}): {type(error).__name__}: {error}")
        return None
    path = node.graph_path
    return [
        Tensor(dtypes.name_of(array.dtype), array.shape, array if node.constant is not None else None, path)
        for array in results
    ]


def _body_results(model, item, node, types, report, constant_of):
    view = item.bodies[0]
    names = [entry.name for entry in view.proto.input]
    # By position: what a body says of its inputs' types is not read. None of them is a constant inside.
    inputs = {
        name: dataclasses.replace(tensor, array=None, graph_path=view.path)
        for name, tensor in zip(names, node.inputs, strict=True)
    }
    outside = types if node.kind == "Loop" else {}
    body = type_graph(model, view, {**outside, **inputs}, report, constant_of)
    if body is None:
        return None
    node.bodies, node.body_results = [body], [body.types[name] for name in body.outputs]
    if node.kind == "Call":
        return node.body_results
    if not _obeys(node, report):
        return None
    carried, trips = len(node.inputs) - 2, int(np.reshape(node.inputs[0].array, ()))
    scans = [dataclasses.replace(tensor, shape=(trips, *tensor.shape)) for tensor in node.body_results[1 + carried :]]
    return [dataclasses.replace(tensor, array=None) for tensor in (*node.body_results[1 : 1 + carried], *scans)]

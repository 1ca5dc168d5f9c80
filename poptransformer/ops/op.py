"""What an op is: a name, a rule for the shapes and dtypes of its results, and a NumPy reference.

Each family file declares its ops with `define` and gives the functions that models call; those end in `emit`. Lowerings
live with the backends, under the same file name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from poptransformer.errors import UserError
from poptransformer.graph import Graph, Spec, Value


@dataclasses.dataclass(frozen=True)
class Op:
    """One op of the graph.

    Attributes:
      name: what nodes call it.
      infer: (*specs, **attributes) -> list of Spec; raises ShapeError for arguments that do not fit.
      reference: (*arrays, **attributes) -> list of arrays; the op's definition.
      family: name of the file that declares it; lowerings and tests stand under the same name.
    """

    name: str
    infer: Callable[..., list[Spec]]
    reference: Callable[..., list[np.ndarray]]
    family: str


class ShapeError(UserError):
    """Arguments of an op do not fit; `emit` adds the layer's name."""


OPS: dict[str, Op] = {}


def define(name: str, infer: Callable, reference: Callable) -> Op:
    """Add an op to the op set; the family is the module that declares its rule."""
    assert name not in OPS, f"op {name!r} is declared twice"
    OPS[name] = Op(name, infer, reference, infer.__module__.rpartition(".")[2])
    return OPS[name]


def emit(name: str, *inputs: Value | None, **attributes) -> tuple[Value, ...]:
    """Add a node for op `name` to the innermost graph that the inputs belong to.

    Returns: the node's results.
    Raises: UserError naming layer, op and argument specs when the op's rule refuses them.
    """
    graph = innermost(inputs)
    try:
        results = OPS[name].infer(*(value and value.spec for value in inputs), **attributes)
    except ShapeError as error:
        specs = ", ".join(str(value.spec) if value is not None else "none" for value in inputs)
        raise UserError(f"{graph.where(name)}({specs}): {error}") from None
    return graph.add_node(name, inputs, results, attributes)


def innermost(values: Sequence[Value | None]) -> Graph:
    """The deepest graph that the values come from: inside a loop body that is the body, unless all are from outside."""
    graphs = [value.graph for value in values if value is not None]
    if not graphs:
        raise UserError("an op needs at least one input that is a Value; wrap arrays with Graph.constant")
    return max(graphs, key=lambda graph: graph.depth)


def require(condition: bool, message: str) -> None:
    """Refuse an op's arguments with a message that says what was wanted."""
    if not condition:
        raise ShapeError(message)


def wrap(value, like: Value) -> Value:
    """Turn a Python number into a constant of the same dtype as `like`; Values pass through."""
    return value if isinstance(value, Value) else like.graph.constant(value, dtype=like.dtype)

"""What an op is: a name, a rule for the shapes and dtypes of its results, and a NumPy reference.

Each family file declares its ops with `define` and gives the functions that models call; those end in `emit`. Lowerings
live with the backends, under the same file name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from poptransformer.errors import UserError
from poptransformer.graph import Graph, Spec, Value, bfloat16


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


def emit(name: str, *inputs: Value | None, graph: Graph | None = None, **attributes) -> tuple[Value, ...]:
    """Add a node for op `name` to a graph; None: to the innermost one that the inputs belong to.

    Returns: the node's results.
    Raises: UserError naming layer, op and argument specs when the op's rule refuses them.
    """
    graph = graph or innermost(inputs)
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


def require_float(spec: Spec, message: str = "wants a floating dtype") -> None:
    """Refuse an operand that is not floating."""
    require(is_float(spec.dtype), message)


def is_float(dtype) -> bool:
    """Whether a dtype is floating, bfloat16 included."""
    return np.issubdtype(dtype, np.floating) or np.dtype(dtype) == bfloat16


def widen(array: np.ndarray) -> np.ndarray:
    """A floating array in float32 or wider: what references compute in, so that 16-bit results are rounded once."""
    return array.astype(np.result_type(array.dtype, np.float32))


def normal_axis(axis: int, x: Value) -> int:
    """Count an axis from the front; one that x does not have stays as it is, for the op's rule to refuse."""
    return axis + x.rank if -x.rank <= axis < 0 else axis


def wrap(value, like: Value) -> Value:
    """Turn a Python number (or an array) into a constant of the same dtype as `like`; Values pass through.

    Raises: UserError if an integer or bool dtype cannot hold the number: 0.5 beside an int32 would turn into 0.
    """
    if isinstance(value, Value):
        return value
    if not isinstance(like, Value):
        raise UserError("an op needs at least one input that is a Value; wrap arrays with Graph.constant")
    array = np.asarray(value)
    fits = is_float(like.dtype) or (like.dtype == bool) == (array.dtype == bool)
    if fits and not is_float(like.dtype):
        with np.errstate(invalid="ignore"):
            fits = np.array_equal(array.astype(like.dtype), array)
    if not fits:
        raise UserError(f"{like.graph.scope_name or like.graph.name}: {value!r} is no {like.dtype} like {like.name}; cast it")
    return like.graph.constant(array, dtype=like.dtype)

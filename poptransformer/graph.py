"""The static graph that models build and backends compile: values, nodes, parameters, states.

A graph knows no device and no compiler; building one needs NumPy alone. Every shape is static. Ops (``poptransformer.ops``)
add nodes through `Graph.add_node`; each op infers the shapes and dtypes of its results when it is built, so a wrong
argument is refused here, with the name of the layer that gave it.

    graph = Graph("double")
    x = graph.input("x", (2, 3), np.float32)
    graph.output("y", x + x)
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import ml_dtypes
import numpy as np

from poptransformer.errors import UserError
from poptransformer.packing import Packing
from poptransformer.parallel import Cut

bfloat16 = np.dtype(ml_dtypes.bfloat16)


@dataclasses.dataclass(frozen=True)
class Spec:
    """Shape and dtype of a value: what an op's rule takes and gives."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def __post_init__(self):
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))

    @property
    def rank(self):
        return len(self.shape)

    @property
    def num_bytes(self):
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def __str__(self):
        return f"{self.dtype.name}{list(self.shape)}"


@dataclasses.dataclass(eq=False)
class Parameter:
    """A weight: what it is called, its shape on one rank, how it is cut over ranks, and how to get it.

    Attributes:
      name: the name the model gives it, e.g. ``transformer.h.0.attn.c_attn.weight``.
      shape, dtype: as the graph sees it.
      cut: how the whole weight is cut over tensor-parallel ranks; None: each rank holds it whole.
      packing: what the bytes of one rank's packed matrix mean; None for an array of numbers.
      load: (rank) -> the rank's array, read when a backend asks for it; set by the model.
      init: how random weights are drawn, "normal" (deviation 0.02), "ones" or "zeros"; used where `load` is None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    cut: Cut | None = None
    load: Callable[[int], np.ndarray] | None = None
    init: str = "normal"
    packing: Packing | None = None

    @property
    def spec(self):
        return Spec(self.shape, self.dtype)

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """Shape of the whole weight, packed or not, cut or not."""
        shape = (self.packing.out_features, self.packing.in_features) if self.packing else self.shape
        if self.cut is None:
            return shape
        return (*shape[: self.cut.axis], self.cut.whole_size, *shape[self.cut.axis + 1 :])

    @property
    def whole_packing(self) -> Packing | None:
        """What the bytes of the whole matrix mean, cut or not; None for an array of numbers."""
        if self.packing is None or self.cut is None:
            return self.packing
        out_features, in_features = self.logical_shape
        return dataclasses.replace(self.packing, out_features=out_features, in_features=in_features)

    @property
    def whole_spec(self) -> Spec:
        """Shape and dtype of the whole weight as a model of one rank has it."""
        return Spec(self.whole_packing.shape if self.packing else self.logical_shape, self.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class State:
    """A tensor that stays on the device from one run to the next (a KV cache). It starts as zeros.

    Attributes:
      name, shape, dtype: as one rank sees it.
      is_cut: whether each tensor-parallel rank holds a value of its own (its heads' keys); False: all hold the same.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    is_cut: bool = False

    @property
    def spec(self):
        return Spec(self.shape, self.dtype)


class Value:
    """A tensor in a graph: the result of a node, or an input, parameter, state or constant."""

    __slots__ = ("graph", "name", "spec", "stage")
    __array_ufunc__ = None  # so that `numpy_array * value` asks Value instead of taking it for an object scalar

    def __init__(self, graph: Graph, name: str, spec: Spec, stage: int):
        self.graph, self.name, self.spec, self.stage = graph, name, spec, stage

    @property
    def shape(self):
        return self.spec.shape

    @property
    def dtype(self):
        return self.spec.dtype

    @property
    def rank(self):
        return len(self.spec.shape)

    def __repr__(self):
        return f"Value({self.name}: {self.spec})"

    # `elementwise` fills in the arithmetic operators (+, -, *, /, comparisons), so that layers read as their equations.


@dataclasses.dataclass(eq=False)
class Node:
    """One op applied to values. `attributes` are Python values fixed when the graph is built."""

    op: str
    inputs: tuple[Value | None, ...]  # None: an optional input that was left out
    attributes: dict
    outputs: tuple[Value, ...] = ()
    scope: str = ""
    stage: int = 0


class Graph:
    """A list of nodes in execution order, with its inputs, parameters, states and outputs.

    A graph with a parent is the body of a `loop`: it may use values of the graphs around it; its parameters, states and
    constants are registered with the outermost graph.
    """

    def __init__(self, name: str, parent: Graph | None = None):
        self.name = name
        self.parent = parent
        self.nodes: list[Node] = []
        self.inputs: dict[str, Value] = {}
        self.outputs: dict[str, Value] = {}
        self.parameters: dict[str, tuple[Parameter, Value]] = {}
        self.states: dict[str, tuple[State, Value]] = {}
        self.state_updates: dict[str, Value] = {}
        self.constants: dict[Value, np.ndarray] = {}
        self._scopes: list[str] = list(parent._scopes) if parent else []
        self._stage = parent._stage if parent else 0
        self._names: dict[str, int] = parent._names if parent else {}  # how often each was given

    def __repr__(self):
        return f"Graph({self.name}: {len(self.nodes)} nodes, inputs {list(self.inputs)}, outputs {list(self.outputs)})"

    # ---- what a graph is made of

    @property
    def root(self) -> Graph:
        return self.parent.root if self.parent else self

    @property
    def depth(self) -> int:
        return self.parent.depth + 1 if self.parent else 0

    def input(self, name: str, shape: Sequence[int], dtype) -> Value:
        """Declare a tensor that is given anew for each run."""
        if name in self.inputs:
            raise UserError(f"graph {self.name!r} already has an input {name!r}")
        self.inputs[name] = self._value(name, Spec(tuple(shape), dtype))
        return self.inputs[name]

    def parameter(self, parameter: Parameter) -> Value:
        """Return the value of a weight; asking twice for the same Parameter (a tied weight) gives the same value."""
        return self.root._register(self.root.parameters, parameter)

    def state(self, state: State) -> Value:
        """Return what a state holds when the run begins."""
        return self.root._register(self.root.states, state)

    def update_state(self, state: State, value: Value) -> None:
        """Say what a state holds when the run ends. Without an update it keeps what it held."""
        root = self.root
        root._register(root.states, state)
        if self is not root:
            raise UserError(f"state {state.name!r} is updated inside a loop body; carry it through the loop instead")
        if value.spec != state.spec:
            raise UserError(f"state {state.name!r} holds {state.spec}, its update is {value.spec}")
        self._check_sees(value, f"update of state {state.name!r}")
        root.state_updates[state.name] = value

    def constant(self, array, dtype=None) -> Value:
        """Put an array (or a number) into the graph."""
        root = self.root
        array = np.asarray(array, dtype=dtype)
        if dtype is None and array.dtype == np.float64:
            array = array.astype(np.float32)
        if dtype is None and array.dtype == np.int64:
            if array.size and not np.iinfo(np.int32).min <= array.min() <= array.max() <= np.iinfo(np.int32).max:
                raise UserError(f"graph {self.name!r}: a constant does not fit int32; give its dtype")
            array = array.astype(np.int32)
        value = root._value("constant", Spec(array.shape, array.dtype))
        root.constants[value] = array
        return value

    def output(self, name: str, value: Value) -> None:
        """Name a value that a run returns."""
        if name in self.outputs:
            raise UserError(f"graph {self.name!r} already has an output {name!r}")
        self._check_sees(value, f"output {name!r}")
        self.outputs[name] = value

    def add_node(self, op: str, inputs: Sequence[Value | None], results: Sequence[Spec], attributes: dict):
        """Append a node whose results have the given specs; `poptransformer.ops` calls this. Returns a tuple of Values."""
        for value in inputs:
            if value is not None:
                self._check_sees(value, self.where(op))
        # What comes after a stage stays there: along the graph stages never go back.
        stage = max([self._stage, *(value.stage for value in inputs if value is not None)])
        node = Node(op, tuple(inputs), attributes, scope=self.scope_name, stage=stage)
        node.outputs = tuple(self._value(f"{self.scope_name}/{op}".lstrip("/"), spec, stage) for spec in results)
        self.nodes.append(node)
        return node.outputs

    # ---- names and placement

    @contextlib.contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Name the layer that the nodes added inside belong to; shown in errors and in saved graphs."""
        self._scopes.append(name)
        try:
            yield
        finally:
            self._scopes.pop()

    @property
    def scope_name(self) -> str:
        return self._scopes[-1] if self._scopes else ""

    @contextlib.contextmanager
    def stage(self, index: int) -> Iterator[None]:
        """Place the nodes added inside on stage `index` (a device, or a group of tensor-parallel devices), or a later one if
        they use values from there.
        """
        before, self._stage = self._stage, index
        try:
            yield
        finally:
            self._stage = before

    def where(self, op: str) -> str:
        """Layer and op, as error messages name them."""
        return f"{self.scope_name}: {op}" if self.scope_name else op

    # ---- reading

    def walk(self) -> Iterator[Node]:
        """All nodes in execution order, those of loop bodies included."""
        for node in self.nodes:
            yield node
            for attribute in node.attributes.values():
                if isinstance(attribute, Graph):
                    yield from attribute.walk()

    def stages_of(self) -> dict[str, tuple[int, ...]]:
        """The stages that use each parameter and state, by name."""
        names = {value: name for name, (_, value) in (*self.parameters.items(), *self.states.items())}
        used = {name: set() for name in names.values()}
        for node in self.walk():
            if node.op != "loop":  # what a loop carries is used in its body
                for value in node.inputs:
                    if value in names:
                        used[names[value]].add(node.stage)
        for node in self.walk():
            for before, inner in _carried(node):
                if before in names:
                    used[names[before]] |= {user.stage for user in node.attributes["body"].walk() if inner in user.inputs}
        return {name: tuple(sorted(stages)) or (0,) for name, stages in used.items()}

    def parameter_bytes_read(self) -> int:
        """Bytes of parameters that one run (one step of a loop) reads: each once, tables that are only looked up not at all."""
        read = {
            value
            for node in self.walk()
            for place, value in enumerate(node.inputs)
            if value is not None and not (node.op == "gather" and place == 0)
        }
        return sum(parameter.spec.num_bytes for parameter, value in self.parameters.values() if value in read)

    def save_onnx(self, path) -> None:
        """Write the graph (without weights) as an ONNX file, to be looked at in Netron. Needs the package `onnx`."""
        from poptransformer.onnx_writer import save_onnx

        save_onnx(self, path)

    def _sees(self, other: Graph) -> bool:
        return other is self or (self.parent is not None and self.parent._sees(other))

    def _check_sees(self, value: Value, where: str) -> None:
        if not self._sees(value.graph):
            raise UserError(f"{where}: {value.name} belongs to graph {value.graph.name!r}, not {self.name!r}")

    def _value(self, name: str, spec: Spec, stage: int = 0) -> Value:
        unique = name
        while unique in self._names:
            self._names[name] += 1
            unique = f"{name}:{self._names[name]}"
        self._names[unique] = 0
        return Value(self, unique, spec, stage)

    def _register(self, table, item):
        known, value = table.get(item.name, (item, None))
        if known is not item:
            raise UserError(f"graph {self.name!r}: two different things are called {item.name!r}")
        if value is None:
            value = self._value(item.name, item.spec)
            table[item.name] = (item, value)
        return value


def _carried(node: Node):
    """(value given to a loop, the body's input that it becomes) for each value that a loop node carries."""
    if node.op != "loop":
        return []
    inner = [value for name, value in node.attributes["body"].inputs.items() if name != "step"]
    return list(zip(node.inputs[1:], inner, strict=True))

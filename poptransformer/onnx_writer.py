"""Graphs as ONNX files: to be looked at in Netron, and to hand the standard part of a graph to another runtime.

What ONNX has becomes operators of ai.onnx. Ops that are whole on purpose (attention, sample, ...) stay whole, in the domain
`ai.poptransformer`, with their attributes. Weights are not written: parameters are inputs under their names. A state is an
input under its name and an output `<name>.next`. Nodes are called after the layer they belong to.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from poptransformer.errors import UserError
from poptransformer.graph import Graph, Node, Spec, Value
from poptransformer.ops.op import is_float

DOMAIN = "ai.poptransformer"
OPSET = 21
IR_VERSION = 10  # the one that goes with opset 21

TRANSLATIONS: dict[str, Callable] = {}


def save_onnx(graph: Graph, path) -> None:
    """Write a graph as an ONNX file, without weights.

    Raises: UserError if the package `onnx` is not installed.
    """
    _onnx().save(to_onnx(graph), path)


def to_onnx(graph: Graph):
    """Return a graph as an onnx.ModelProto."""
    onnx = _onnx()
    model = onnx.helper.make_model(
        _Writer(onnx, graph).write(),
        opset_imports=[onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(DOMAIN, 1)],
        producer_name="poptransformer",
    )
    model.ir_version = IR_VERSION
    return model


def _onnx():
    try:
        import onnx
    except ImportError:
        raise UserError("saving a graph needs the package onnx: pip install onnx") from None
    return onnx


class _Writer:
    """Writes one graph: the outermost, or the body of a loop. Names are unique over all of them, as ONNX asks for."""

    def __init__(self, onnx, graph: Graph, outer: _Writer | None = None):
        self.onnx, self.graph = onnx, graph
        self.names: dict[Value, str] = outer.names if outer else {}
        self.taken: set[str] = outer.taken if outer else set()
        self.node_names: dict[str, int] = outer.node_names if outer else {}  # how often each was given
        self.prefix = ""  # layer of the node that is being written
        self.nodes, self.initializers, self.value_infos = [], [], []
        self._constants: dict[tuple, str] = {}

    def write(self):
        """The whole graph as a GraphProto."""
        graph = self.graph
        inputs = [self._declare(value, name, "") for name, value in graph.inputs.items()]
        inputs += [self._declare(value, name, "parameter") for name, (_, value) in graph.parameters.items()]
        inputs += [self._declare(value, name, "state") for name, (_, value) in graph.states.items()]
        for value, array in graph.constants.items():
            self._initialize(self._name(value), array)
        results = [(name, value, "") for name, value in graph.outputs.items()]
        results += [(f"{name}.next", value, "state") for name, value in graph.state_updates.items()]
        outputs = self._outputs(results)
        return self.onnx.helper.make_graph(
            self.nodes, graph.name, inputs, outputs, initializer=self.initializers, value_info=self.value_infos
        )

    def write_body(self):
        """A loop's body: ONNX gives it the step as int64 and the last condition."""
        step, *carried = self.graph.inputs.values()
        iteration, condition = self.unique(f"{self.graph.name}/iteration"), self.unique(f"{self.graph.name}/condition")
        inputs = [self._info(iteration, Spec((), np.int64)), self._info(condition, Spec((), bool))]
        inputs += [self._declare(value, value.name, "") for value in carried]
        self.add_node("Cast", [iteration], [self._name(step)], to=self.dtype(np.int32))
        outputs = self._outputs([(f"{self.graph.name}/{name}", value, "") for name, value in self.graph.outputs.items()])
        return self.onnx.helper.make_graph(
            self.nodes, self.graph.name, inputs, outputs, initializer=self.initializers, value_info=self.value_infos
        )

    # ---- for the translations

    def add(self, kind: str, inputs, spec: Spec, result: Value | None = None, domain: str = "", **attributes) -> str:
        """Append a node with one output and return that output's name.

        Args:
          inputs: Values or names; None leaves an optional input out.
          spec: of the output.
          result: the Value that the output is; None for a step on the way to one.
        """
        output = self._name(result) if result is not None else self.unique(f"{self.prefix}{kind}")
        self.add_node(kind, [self.ref(item) for item in inputs], [output], domain, **attributes)
        if result is None:
            self.value_infos.append(self._info(output, spec))
        return output

    def add_node(self, kind: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes) -> None:
        """Append a node whose outputs have names already. It is called after its layer: `transformer.h.0.mlp.c_fc/MatMul`."""
        while inputs and not inputs[-1]:
            inputs = inputs[:-1]
        count = self.node_names[self.prefix + kind] = self.node_names.get(self.prefix + kind, 0) + 1
        name = self.prefix + kind + (f":{count - 1}" if count > 1 else "")
        self.nodes.append(self.onnx.helper.make_node(kind, inputs, outputs, name, domain=domain, **attributes))

    def cast(self, item, before, after, spec: Spec) -> str:
        """The name of `item` (of dtype `before`) in dtype `after`; the item's own where they are the same."""
        if np.dtype(before) == np.dtype(after):
            return self.ref(item)
        return self.add("Cast", [item], Spec(spec.shape, after), to=self.dtype(after))

    def finish(self, item: str, before, result: Value) -> None:
        """Give the result that has been computed in dtype `before` its own dtype and name."""
        if np.dtype(before) == result.dtype:
            self.add("Identity", [item], result.spec, result)
        else:
            self.add("Cast", [item], result.spec, result, to=self.dtype(result.dtype))

    def constant(self, numbers, dtype=np.int64) -> str:
        """The name of a small constant: a shape, axes, a scalar."""
        array = np.asarray(numbers, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.unique(f"{self.graph.name}/{array.dtype}{array.tolist()}")
            self._initialize(self._constants[key], array)
        return self._constants[key]

    def dtype(self, dtype) -> int:
        """ONNX's number for a dtype."""
        name = np.dtype(dtype).name
        return getattr(
            self.onnx.TensorProto,
            {"float32": "FLOAT", "float64": "DOUBLE", "float8_e4m3fn": "FLOAT8E4M3FN"}.get(name, name.upper()),
        )

    def ref(self, item) -> str:
        """The name of an input: a Value, a name, or None for one that is left out."""
        return "" if item is None else self._name(item) if isinstance(item, Value) else item

    def unique(self, name: str) -> str:
        """A name that nothing has yet."""
        candidate, count = name, 0
        while candidate in self.taken:
            count += 1
            candidate = f"{name}:{count}"
        self.taken.add(candidate)
        return candidate

    def _initialize(self, name, array):
        data = array.astype(array.dtype.newbyteorder("<")).tobytes()
        tensor = self.onnx.helper.make_tensor(name, self.dtype(array.dtype), array.shape, data, raw=True)
        self.initializers.append(tensor)

    def _name(self, value: Value) -> str:
        if value not in self.names:
            self.names[value] = self.unique(value.name)
        return self.names[value]

    def _declare(self, value, name, doc):
        """A graph input, under exactly its name where that is free."""
        if value not in self.names:
            self.names[value] = self.unique(name)
        return self._info(self.names[value], value.spec, doc)

    def _info(self, name, spec, doc=""):
        return self.onnx.helper.make_tensor_value_info(name, self.dtype(spec.dtype), spec.shape, doc_string=doc)

    def _outputs(self, results):
        """Write the nodes; a value of these nodes that is an output takes the output's name, others get an Identity."""
        made_here = {value for node in self.graph.nodes for value in node.outputs}
        infos, copies = [], []
        for name, value, doc in results:
            output = self.unique(name)
            if value in made_here and value not in self.names:
                self.names[value] = output
            else:
                copies.append((value, output))
            infos.append(self._info(output, value.spec, doc))
        is_output = {value for _, value, _ in results}
        for node in self.graph.nodes:
            self._write_node(node)
            self.value_infos += [self._info(self._name(value), value.spec) for value in node.outputs if value not in is_output]
        self.prefix = ""
        for value, output in copies:
            self.add_node("Identity", [self._name(value)], [output])
        return infos

    def _write_node(self, node):
        self.prefix = f"{node.scope}/" if node.scope else ""
        TRANSLATIONS[node.op](self, node, **node.attributes)


def _translates(*names):
    """Decorator that enters a function (writer, node, **attributes) into the table."""

    def enter(function):
        TRANSLATIONS.update(dict.fromkeys(names, function))
        return function

    return enter


def _wide(dtype):
    return np.result_type(dtype, np.float32)


# ---- element-wise: one operator each

_PLAIN = {
    "neg": "Neg", "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "tanh": "Tanh", "sigmoid": "Sigmoid", "relu": "Relu",
    "add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "minimum": "Min", "maximum": "Max",
    "equal": "Equal", "less": "Less", "less_equal": "LessOrEqual", "greater": "Greater", "greater_equal": "GreaterOrEqual",
    "logical_and": "And", "logical_or": "Or", "logical_not": "Not", "select": "Where",
}  # fmt: skip


@_translates(*_PLAIN)
def _plain(writer: _Writer, node: Node):
    writer.add(_PLAIN[node.op], node.inputs, node.outputs[0].spec, node.outputs[0])


@_translates("gelu", "gelu_tanh")
def _gelu(writer, node):
    approximate = "tanh" if node.op == "gelu_tanh" else "none"
    writer.add("Gelu", node.inputs, node.outputs[0].spec, node.outputs[0], approximate=approximate)


@_translates("silu")
def _silu(writer, node):
    (x,), (y,) = node.inputs, node.outputs
    wide = Spec(x.shape, _wide(x.dtype))
    x = writer.cast(x, x.dtype, wide.dtype, wide)
    product = [x, writer.add("Sigmoid", [x], wide)]
    if wide == y.spec:
        writer.add("Mul", product, y.spec, y)
    else:
        writer.finish(writer.add("Mul", product, wide), wide.dtype, y)


@_translates("cast")
def _cast(writer, node, dtype):
    writer.add("Cast", node.inputs, node.outputs[0].spec, node.outputs[0], to=writer.dtype(dtype))


# ---- shape


@_translates("reshape")
def _reshape(writer, node, shape):
    attributes = {"allowzero": 1} if 0 in shape else {}
    (y,) = node.outputs
    writer.add("Reshape", [*node.inputs, writer.constant(shape)], y.spec, y, **attributes)


@_translates("transpose")
def _transpose(writer, node, axes):
    writer.add("Transpose", node.inputs, node.outputs[0].spec, node.outputs[0], perm=list(axes))


@_translates("broadcast_to")
def _broadcast_to(writer, node, shape):
    writer.add("Expand", [*node.inputs, writer.constant(shape)], node.outputs[0].spec, node.outputs[0])


@_translates("split")
def _split(writer, node, sizes, axis):
    inputs = [writer.ref(node.inputs[0]), writer.constant(sizes)]
    writer.add_node("Split", inputs, [writer.ref(value) for value in node.outputs], axis=axis)


@_translates("concat")
def _concat(writer, node, axis):
    writer.add("Concat", node.inputs, node.outputs[0].spec, node.outputs[0], axis=axis)


@_translates("slice")
def _slice(writer, node, start, stop, axis):
    bounds = [writer.constant([number]) for number in (start, stop, axis)]
    writer.add("Slice", [*node.inputs, *bounds], node.outputs[0].spec, node.outputs[0])


@_translates("dynamic_update")
def _dynamic_update(writer, node, axis):
    """ScatterElements at start, start + 1, ... along the axis, with start held inside."""
    (x, update, start), (y,) = node.inputs, node.outputs
    scalar, count = Spec((), np.int32), update.shape[axis]
    last = writer.constant(x.shape[axis] - count, np.int32)
    start = writer.add("Clip", [start, writer.constant(0, np.int32), last], scalar)
    column = [count if i == axis else 1 for i in range(x.rank)]
    offsets = writer.constant(np.arange(count).reshape(column), np.int32)
    positions = writer.add("Add", [start, offsets], Spec(column, np.int32))
    positions = writer.add("Expand", [positions, writer.constant(update.shape)], Spec(update.shape, np.int32))
    writer.add("ScatterElements", [x, positions, update], y.spec, y, axis=axis)


@_translates("gather")
def _gather(writer, node):
    writer.add("Gather", node.inputs, node.outputs[0].spec, node.outputs[0], axis=0)


# ---- reductions


@_translates("reduce_max", "reduce_any")
def _reduce_max(writer, node, axis):
    writer.add("ReduceMax", [*node.inputs, writer.constant([axis])], node.outputs[0].spec, node.outputs[0], keepdims=0)


@_translates("reduce_sum")
def _reduce_sum(writer, node, axis):
    (x,), (y,) = node.inputs, node.outputs
    dtype = _wide(x.dtype) if is_float(x.dtype) else x.dtype
    inputs = [writer.cast(x, x.dtype, dtype, x.spec), writer.constant([axis])]
    if dtype == y.dtype:
        writer.add("ReduceSum", inputs, y.spec, y, keepdims=0)
    else:
        writer.finish(writer.add("ReduceSum", inputs, Spec(y.shape, dtype), keepdims=0), dtype, y)


@_translates("argmax")
def _argmax(writer, node, axis):
    (x,), (y,) = node.inputs, node.outputs
    number = writer.cast(x, x.dtype, np.int32 if x.dtype == bool else x.dtype, x.spec)
    at = writer.add("ArgMax", [number], Spec(y.shape, np.int64), axis=axis, keepdims=0)
    writer.finish(at, np.int64, y)


# ---- products: summed in float32 whatever the operands' dtype, so 16 bits are cast on both sides


@_translates("matmul")
def _matmul(writer, node, out_dtype):
    (x, y), (result,) = node.inputs, node.outputs
    wide = np.result_type(_wide(x.dtype), _wide(y.dtype))
    inputs = [writer.cast(value, value.dtype, wide, value.spec) for value in (x, y)]
    if wide == result.dtype:
        writer.add("MatMul", inputs, result.spec, result)
    else:
        writer.finish(writer.add("MatMul", inputs, Spec(result.shape, wide)), wide, result)


@_translates("linear")
def _linear(writer, node, out_dtype):
    (x, weight, bias), (result,) = node.inputs, node.outputs
    wide = np.result_type(_wide(x.dtype), _wide(weight.dtype))
    out = Spec(result.shape, wide)
    is_done = wide == result.dtype
    x = writer.cast(x, x.dtype, wide, x.spec)
    turned = Spec(weight.shape[::-1], weight.dtype)
    product = [x, writer.cast(writer.add("Transpose", [weight], turned, perm=[1, 0]), weight.dtype, wide, turned)]
    y = writer.add("MatMul", product, out, result if is_done and bias is None else None)
    if bias is not None:
        y = writer.add("Add", [y, writer.cast(bias, bias.dtype, wide, bias.spec)], out, result if is_done else None)
    if not is_done:
        writer.finish(y, wide, result)


# ---- norms


@_translates("softmax")
def _softmax(writer, node):
    (x,), (y,) = node.inputs, node.outputs
    wide = _wide(x.dtype)
    inputs = [writer.cast(x, x.dtype, wide, x.spec)]
    if wide == y.dtype:
        writer.add("Softmax", inputs, y.spec, y, axis=-1)
    else:
        writer.finish(writer.add("Softmax", inputs, Spec(y.shape, wide), axis=-1), wide, y)


@_translates("layer_norm")
def _layer_norm(writer, node, eps):
    """LayerNormalization computes in float32 (stash_type) but wants x, weight and bias in one dtype."""
    (x, weight, bias), (y,) = node.inputs, node.outputs
    dtype = x.dtype if weight.dtype == bias.dtype == x.dtype else _wide(x.dtype)
    inputs = [writer.cast(value, value.dtype, dtype, value.spec) for value in (x, weight, bias)]
    attributes = {"axis": -1, "epsilon": eps, "stash_type": writer.dtype(np.float32)}
    if dtype == y.dtype:
        writer.add("LayerNormalization", inputs, y.spec, y, **attributes)
    else:
        writer.finish(writer.add("LayerNormalization", inputs, Spec(y.shape, dtype), **attributes), dtype, y)


@_translates("rms_norm")
def _rms_norm(writer, node, eps):
    """In steps: this opset has no operator for it."""
    (x, weight), (y,) = node.inputs, node.outputs
    wide = Spec(x.shape, _wide(x.dtype))
    column = Spec((*x.shape[:-1], 1), wide.dtype)
    x = writer.cast(x, x.dtype, wide.dtype, wide)
    mean = writer.add("ReduceMean", [writer.add("Mul", [x, x], wide), writer.constant([-1])], column, keepdims=1)
    mean = writer.add("Add", [mean, writer.constant(eps, wide.dtype)], column)
    normed = writer.add("Div", [x, writer.add("Sqrt", [mean], column)], wide)
    normed = writer.cast(normed, wide.dtype, y.dtype, wide)
    product = np.result_type(_wide(y.dtype), _wide(weight.dtype))
    factors = [
        writer.cast(normed, y.dtype, product, y.spec),
        writer.cast(weight, weight.dtype, product, weight.spec),
    ]
    if product == y.dtype:
        writer.add("Mul", factors, y.spec, y)
    else:
        writer.finish(writer.add("Mul", factors, Spec(y.shape, product)), product, y)


# ---- control flow


@_translates("loop")
def _loop(writer, node, max_steps, body):
    written = _Writer(writer.onnx, body, writer).write_body()
    inputs = [writer.constant(max_steps), *(writer.ref(value) for value in node.inputs)]
    writer.add_node("Loop", inputs, [writer.ref(value) for value in node.outputs], body=written)


# ---- ops of our own


@_translates("packed_linear", "packed_gather")
def _packed(writer, node, packing, out_dtype):
    _own(writer, node, kind=packing.kind, group_size=packing.group_size, out_features=packing.out_features,
         in_features=packing.in_features, out_dtype=writer.dtype(out_dtype))  # fmt: skip


@_translates(
    "attention", "rope", "sample", "repetition_penalty", "mark_tokens", "token_log_prob", "token_shift", "wkv",
    "all_reduce", "all_gather", "rank_index",
)  # fmt: skip
def _own(writer, node, **attributes):
    inputs, outputs = ([writer.ref(value) for value in values] for values in (node.inputs, node.outputs))
    attributes = {name: value for name, value in attributes.items() if value is not None}
    writer.add_node(node.op, inputs, outputs, DOMAIN, **attributes)

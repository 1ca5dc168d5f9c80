"""Emitter: writes ONNX nodes of ai.onnx opset 10 and ai.graphcore 1, with the shape and dtype of every result.

One Emitter writes one graph: the main graph, or the body of a Loop (`child`). What PopART wants of a graph and ONNX does not
is kept here, so that lowerings need not think of it:

  - each graph has the Constant nodes it uses, in raw bytes; bool constants larger than one element are cast from int32;
  - shapes are static, and arithmetic is never in int64;
  - every node has its IPU (`__ipu_number`), and an outlining attribute: equal parts of different blocks may share code;
  - the same op on the same tensors is written once, so that masks are not computed anew in each layer;
  - outputs of a graph are results of its own nodes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence

import numpy as np

from poptransformer.backends.popart.proto import load_onnx
from poptransformer.backends.popart.tensors import ONNX_TYPES, Tensor, Weight
from poptransformer.errors import UnsupportedError
from poptransformer.graph import Spec

GRAPHCORE = "ai.graphcore"


class Emitter:
    """Writes the nodes of one graph.

    Args:
      num_replicas: ranks that run the same program, R.
      parent: the Emitter of the graph around this one, for a body.

    Attributes:
      stage: IPU within the replica that nodes are placed on.
      scope: layer that nodes belong to.
      fed_integers: an int32 input of the main graph, or None.
    """

    def __init__(self, num_replicas: int = 1, parent: Emitter | None = None, use_pipeline: bool = False):
        self.onnx = load_onnx()
        self.parent, self.num_replicas = parent, num_replicas
        self.use_pipeline = use_pipeline
        self.root = parent.root if parent else self
        self.stage = parent.stage if parent else 0
        self.scope = parent.scope if parent else ""
        self.nodes = []
        self._constants: dict[tuple, str] = {}
        self._written: dict[tuple, list[Tensor]] = {}
        if parent is None:
            self.weights: dict[str, Weight] = {}
            self._counts: dict[str, int] = {}
            self.fed_integers: Tensor | None = None

    def child(self) -> Emitter:
        """An Emitter for the body of a loop in this graph."""
        return Emitter(self.num_replicas, self, self.use_pipeline)

    @contextlib.contextmanager
    def at(self, scope: str, stage: int):
        """Name and place the nodes written inside."""
        before = self.scope, self.stage
        self.scope, self.stage = scope, stage
        try:
            yield
        finally:
            self.scope, self.stage = before

    # ---- names

    def unique(self, name: str) -> str:
        """A name that no tensor, node or graph of the model has yet."""
        counts = self.root._counts
        count = counts.get(name, 0)
        counts[name] = count + 1
        return self.unique(f"{name}:{count}") if count else name

    def reference(self, tensor: Tensor) -> str:
        """The id by which a node of this graph names a tensor; writes its Constant node or initializer where it has none."""
        if tensor.array is not None:
            return self._constant_name(tensor.array)
        if tensor.weight is not None:
            return self._weight_name(tensor.weight)
        if tensor.is_zero_state:
            return self.fresh_zeros(tensor.shape, tensor.dtype).name
        return tensor.name

    def stored(self, tensor: Tensor) -> Tensor:
        """A weight as its initializer holds it."""
        return Tensor(self.reference(tensor), Spec(tensor.weight.shape, tensor.weight.dtype))

    def derived(self, tensor: Tensor, suffix: str, shape, dtype, derive) -> Tensor:
        """Another initializer that is worked out from a weight's array on the host: one of a packed matrix's parts."""
        weight = tensor.weight
        part = Weight(
            f"{weight.name}.{suffix}", tuple(shape), np.dtype(dtype), lambda rank: derive(weight.load(rank)), weight.is_cut
        )
        return Tensor("", Spec(part.shape, part.dtype), weight=part)

    def _weight_name(self, weight: Weight) -> str:
        """Each IPU has an initializer of its own: one that two IPUs read would be copied from one to the other in each step."""
        name = weight.name if self.stage == 0 else f"{weight.name}@{self.stage}"
        known = self.root.weights.get(name)
        if known is None:
            self.root.weights[name] = Weight(name, weight.shape, weight.dtype, weight.load, weight.is_cut)
        return name

    def _constant_name(self, array: np.ndarray) -> str:
        array = np.asarray(array, order="C")
        if array.dtype == bool and array.size > 1:  # PopART's folding reads bool constants as four bytes an element
            with_name = self.cast(Tensor("", Spec(array.shape, np.int32), array=array.astype(np.int32)), bool)
            return with_name.name
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._constants:
            name = self._constants[key] = self.unique("constant")
            node = self.onnx.NodeProto(op_type="Constant", name=name, output=[name])
            attribute = node.attribute.add(name="value", type=self.onnx.AttributeProto.TENSOR)
            attribute.t.CopyFrom(tensor_proto(array))
            self.nodes.append(node)
        return self._constants[key]

    # ---- nodes

    def constant(self, array, dtype=None) -> Tensor:
        array = np.array(array, dtype)
        _check_dtype(array.dtype, "a constant")
        return Tensor("", Spec(array.shape, array.dtype), array=array)

    def like(self, value, tensor: Tensor) -> Tensor:
        """A number as a constant of a tensor's dtype; Tensors pass through."""
        return value if isinstance(value, Tensor) else self.constant(value, tensor.dtype)

    def node(self, op: str, inputs: Sequence[Tensor], results: Sequence[Spec], domain: str = "", **attributes) -> list[Tensor]:
        """Write a node, unless the same one is there already.

        Args:
          attributes: int, float, str, Tensor-free lists of int or str, or a GraphProto. Leading underscores stay.
        """
        for spec in results:
            _check_dtype(spec.dtype, f"{self.scope or 'graph'}: {op}")
        names = [self.reference(tensor) for tensor in inputs]
        key = (domain, op, tuple(names), repr(sorted(attributes.items())), self.stage)
        is_loop = op == "Loop"
        if not is_loop and key in self._written:
            return self._written[key]
        label = self.unique(f"{self.scope}/{op}".lstrip("/"))
        outputs = [label if i == 0 else self.unique(f"{label}/{i}") for i in range(len(results))]
        node = self.onnx.NodeProto(op_type=op, name=label, domain=domain, input=names, output=outputs)
        for name, value in attributes.items():
            node.attribute.append(self._attribute(name, value))
        self._place(node)
        self.nodes.append(node)
        tensors = [Tensor(name, spec) for name, spec in zip(outputs, results, strict=True)]
        self._written[key] = tensors
        return tensors

    def _place(self, node) -> None:
        node.attribute.append(self._attribute("__ipu_number", self.stage))
        if self.use_pipeline and self.parent is None:
            node.attribute.append(self._attribute("__pipeline_stage", self.stage))
        if self.scope:
            node.attribute.append(self._attribute("__outline", ["part", re.sub(r"\d+", "*", self.scope)]))

    def _attribute(self, name, value):
        proto, kinds = self.onnx.AttributeProto(name=name), self.onnx.AttributeProto
        if isinstance(value, self.onnx.GraphProto):
            proto.type = kinds.GRAPH
            proto.g.CopyFrom(value)
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], str):
            proto.type = kinds.STRINGS
            proto.strings.extend(text.encode() for text in value)
        elif isinstance(value, (list, tuple)):
            proto.type = kinds.INTS
            proto.ints.extend(int(number) for number in value)
        elif isinstance(value, str):
            proto.type, proto.s = kinds.STRING, value.encode()
        elif isinstance(value, float):
            proto.type, proto.f = kinds.FLOAT, value
        else:
            proto.type, proto.i = kinds.INT, int(value)
        return proto

    # ---- element-wise

    def unary(self, op: str, x: Tensor, domain="") -> Tensor:
        """Neg, Exp, Log, Sqrt, Tanh, Sigmoid, Relu, Erf, Sin, Cos, Floor, ...; Gelu and Swish of ai.graphcore."""
        return self.node(op, [x], [x.spec], domain)[0]

    def binary(self, op: str, x, y, domain="") -> Tensor:
        """Add, Sub, Mul, Div, Min, Max; BitwiseAnd, BitwiseXor, ... of ai.graphcore."""
        x, y = (self.like(x, y), y) if isinstance(y, Tensor) else (x, self.like(y, x))
        assert x.dtype == y.dtype, f"{self.scope}: {op} of {x.dtype} and {y.dtype}"
        return self.node(op, [x, y], [Spec(np.broadcast_shapes(x.shape, y.shape), x.dtype)], domain)[0]

    def add(self, x, y):
        return self.binary("Add", x, y)

    def sub(self, x, y):
        return self.binary("Sub", x, y)

    def mul(self, x, y):
        return self.binary("Mul", x, y)

    def div(self, x, y):
        return self.binary("Div", x, y)

    def minimum(self, x, y):
        """Min; that op knows no integers."""
        if np.issubdtype((x if isinstance(x, Tensor) else y).dtype, np.floating):
            return self.binary("Min", x, y)
        return self.where(self.less(x, y), x, y)

    def maximum(self, x, y):
        """Max; that op knows no integers."""
        if np.issubdtype((x if isinstance(x, Tensor) else y).dtype, np.floating):
            return self.binary("Max", x, y)
        return self.where(self.less(x, y), y, x)

    def compare(self, op: str, x, y) -> Tensor:
        x, y = (self.like(x, y), y) if isinstance(y, Tensor) else (x, self.like(y, x))
        assert x.dtype == y.dtype, f"{self.scope}: {op} of {x.dtype} and {y.dtype}"
        return self.node(op, [x, y], [Spec(np.broadcast_shapes(x.shape, y.shape), bool)])[0]

    def less(self, x, y):
        return self.compare("Less", x, y)

    def greater(self, x, y):
        return self.compare("Greater", x, y)

    def equal(self, x, y):
        """Equal; in ONNX's opset 10 that op knows no floats."""
        if not np.issubdtype((x if isinstance(x, Tensor) else y).dtype, np.floating):
            return self.compare("Equal", x, y)
        return self.logical_not(self.logical_or(self.less(x, y), self._greater_or_unordered(x, y)))

    def less_equal(self, x, y):
        """What opset 10 has no op for; false beside a NaN."""
        if np.issubdtype((x if isinstance(x, Tensor) else y).dtype, np.floating):
            return self.logical_not(self._greater_or_unordered(x, y))
        return self.logical_not(self.greater(x, y))

    def _greater_or_unordered(self, x, y):
        found = self.greater(x, y)
        for operand in (x, y):
            if isinstance(operand, Tensor) and operand.array is None:
                found = self.logical_or(found, self.node("IsNaN", [operand], [Spec(operand.shape, bool)])[0])
        return found

    def greater_equal(self, x, y):
        return self.less_equal(y, x)

    def logical_and(self, x, y):
        return self.compare("And", x, y)

    def logical_or(self, x, y):
        return self.compare("Or", x, y)

    def logical_not(self, x):
        return self.unary("Not", x)

    def where(self, condition: Tensor, x, y) -> Tensor:
        x, y = (self.like(x, y), y) if isinstance(y, Tensor) else (x, self.like(y, x))
        assert x.dtype == y.dtype, f"{self.scope}: Where of {x.dtype} and {y.dtype}"
        return self.node("Where", [condition, x, y], [Spec(np.broadcast_shapes(condition.shape, x.shape, y.shape), x.dtype)])[0]

    def cast(self, x: Tensor, dtype) -> Tensor:
        dtype = np.dtype(dtype)
        if x.dtype == dtype:
            return x
        _check_dtype(dtype, f"{self.scope or 'graph'}: Cast")
        if x.array is not None and dtype.kind != "b":
            with np.errstate(over="ignore", invalid="ignore"):
                return self.constant(x.array.astype(dtype))
        return self.node("Cast", [x], [Spec(x.shape, dtype)], to=ONNX_TYPES[dtype.name])[0]

    def widen(self, x: Tensor) -> Tensor:
        """A floating tensor in float32."""
        return self.cast(x, np.float32)

    # ---- shapes

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        shape = list(shape)
        if -1 in shape:
            rest = int(np.prod([size for size in shape if size != -1], dtype=np.int64))
            shape[shape.index(-1)] = int(np.prod(x.shape, dtype=np.int64)) // max(rest, 1)
        if tuple(shape) == x.shape:
            return x
        if x.array is not None:
            return self.constant(x.array.reshape(shape))
        return self.node("Reshape", [x, self._sizes(shape)], [Spec(shape, x.dtype)])[0]

    def transpose(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        if list(axes) == list(range(x.rank)):
            return x
        return self.node("Transpose", [x], [Spec([x.shape[axis] for axis in axes], x.dtype)], perm=list(axes))[0]

    def expand(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        if tuple(shape) == x.shape:
            return x
        return self.node("Expand", [x, self._sizes(shape)], [Spec(shape, x.dtype)])[0]

    def zeros(self, shape, dtype) -> Tensor:
        """Zeros of any size, without their bytes in the model."""
        dtype = np.dtype(dtype)
        if dtype.kind == "b":
            return self.cast(self.zeros(shape, np.int32), bool)
        return self.expand(self.constant(np.zeros([1] * len(shape), dtype)), shape)

    def fresh_zeros(self, shape, dtype) -> Tensor:
        """Zeros that the device makes in each run: PopART would put those of `zeros` into the program, as large as they are."""
        dtype, fed = np.dtype(dtype), self.root.fed_integers
        if dtype.kind == "b":
            return self.cast(self.fresh_zeros(shape, np.int32), bool)
        if fed is None:
            return self.zeros(shape, dtype)
        one = self.cast(self.slice(self.reshape(fed, (-1,)), 0, 1, 0), dtype)
        return self.expand(self.reshape(self.mul(one, 0), [1] * len(shape)), shape)

    def concat(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        axis = axis % parts[0].rank
        if len(parts) == 1:
            return parts[0]
        shape = list(parts[0].shape)
        shape[axis] = sum(part.shape[axis] for part in parts)
        return self.node("Concat", parts, [Spec(shape, parts[0].dtype)], axis=axis)[0]

    def split(self, x: Tensor, sizes: Sequence[int], axis: int) -> list[Tensor]:
        axis = axis % x.rank
        if len(sizes) == 1:
            return [x]
        results = [Spec((*x.shape[:axis], size, *x.shape[axis + 1 :]), x.dtype) for size in sizes]
        return self.node("Split", [x], results, axis=axis, split=list(sizes))

    def slice(self, x: Tensor, start: int, stop: int, axis: int) -> Tensor:
        axis = axis % x.rank
        if start == 0 and stop == x.shape[axis]:
            return x
        bounds = [self.constant(np.int64([number])) for number in (start, stop, axis)]
        return self.node("Slice", [x, *bounds], [Spec((*x.shape[:axis], stop - start, *x.shape[axis + 1 :]), x.dtype)])[0]

    def pad_end(self, x: Tensor, size: int, axis: int) -> Tensor:
        """Zeros after the elements along an axis, up to a size. Opset 10: pads are attributes."""
        if x.shape[axis] == size:
            return x
        pads = [0] * (2 * x.rank)
        pads[x.rank + axis] = size - x.shape[axis]
        shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
        return self.node("Pad", [x], [Spec(shape, x.dtype)], mode="constant", pads=pads, value=0.0)[0]

    def gather(self, table: Tensor, indices: Tensor) -> Tensor:
        """Rows of a table."""
        return self.node("Gather", [table, indices], [Spec((*indices.shape, *table.shape[1:]), table.dtype)], axis=0)[0]

    def dynamic_slice(self, x: Tensor, index: Tensor, size: int, axis: int) -> Tensor:
        """Elements from an int32 index [1] on along an axis; the rank stays."""
        shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
        index = self.cast(index, np.uint32)
        return self.node("DynamicSlice", [x, index], [Spec(shape, x.dtype)], GRAPHCORE, axes=[axis], sizes=[size])[0]

    def dynamic_update(self, x: Tensor, index: Tensor, update: Tensor, axis: int) -> Tensor:
        """x with an update from an int32 index [1] on along an axis."""
        index, sizes = self.cast(index, np.uint32), [update.shape[axis]]
        return self.node("DynamicUpdate", [x, index, update], [x.spec], GRAPHCORE, axes=[axis], sizes=sizes)[0]

    def _sizes(self, shape):
        return self.constant(np.array(shape, np.int64))

    # ---- sums and products

    def reduce(self, op: str, x: Tensor, axis: int = -1, keepdims: bool = False) -> Tensor:
        """ReduceSum, ReduceMean or ReduceMax along one axis."""
        axis = axis % x.rank
        shape = (*x.shape[:axis], *((1,) if keepdims else ()), *x.shape[axis + 1 :])
        return self.node(op, [x], [Spec(shape, x.dtype)], axes=[axis], keepdims=int(keepdims))[0]

    def argmax(self, x: Tensor, axis: int = -1) -> Tensor:
        """int32. PopART's ArgMax gives int32 where ONNX's gives int64; the Cast makes them the same."""
        axis = axis % x.rank
        spec = Spec(x.shape[:axis] + x.shape[axis + 1 :], np.int64)
        (result,) = self.node("ArgMax", [x], [spec], axis=axis, keepdims=0)
        return self.cast(result, np.int32)

    def softmax(self, x: Tensor) -> Tensor:
        """Along the last axis, the only one that means the same before and after opset 13."""
        return self.node("Softmax", [x], [x.spec], axis=x.rank - 1)[0]

    def top_values(self, x: Tensor, count: int) -> Tensor:
        """The `count` largest along the last axis, in descending order."""
        shape = (*x.shape[:-1], count)
        # Both outputs must have a name.
        return self.node("TopK", [x, self._sizes([count])], [Spec(shape, x.dtype), Spec(shape, np.int64)], axis=x.rank - 1)[0]

    def matmul(self, x: Tensor, y: Tensor, out_dtype=None) -> Tensor:
        """Matrix product of the last two axes; sums are float32, also those of float16 operands."""
        out_dtype = np.dtype(out_dtype or x.dtype)
        assert x.dtype == y.dtype, f"{self.scope}: MatMul of {x.dtype} and {y.dtype}"
        assert x.shape[-1] == y.shape[-2], f"{self.scope}: MatMul of {x.shape} and {y.shape}"
        shape = (*np.broadcast_shapes(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-1])
        attributes = {"__partials_type": "float"} if x.dtype == np.float16 else {}
        if x.dtype == np.float16 and out_dtype == np.float32:
            # PopART's result is float32, and the Cast after it is none; to ONNX, which does not know the attribute, it is one.
            attributes["__output_type"] = "FLOAT"
        return self.cast(self.node("MatMul", [x, y], [Spec(shape, x.dtype)], **attributes)[0], out_dtype)

    def group_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Layer normalisation of x [M, D] over D, as a group normalisation with one group."""
        statistics = Spec((x.shape[0],), np.float32)
        return self.node(
            "GroupNormalization",
            [x, weight, bias],
            [x.spec, statistics, statistics],
            GRAPHCORE,
            num_groups=1,
            epsilon=float(eps),
        )[0]

    # ---- replicas

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over all replicas: what the op does unless attributes say something else, which SDKs spell differently."""
        return self.node("ReplicatedAllReduce", [x], [x.spec], GRAPHCORE)[0]

    def all_gather(self, x: Tensor) -> Tensor:
        """All replicas' tensors: [R, ...]. PopART's op gives one axis, replica after replica."""
        size = self.num_replicas * int(np.prod(x.shape, dtype=np.int64))
        (flat,) = self.node("ReplicatedAllGather", [x], [Spec((size,), x.dtype)], GRAPHCORE)
        return self.reshape(flat, (self.num_replicas, *x.shape))

    # ---- loops

    def loop(self, max_steps: int, keep_going: Tensor, carried: Sequence[Tensor], body) -> list[Tensor]:
        """Run a body until it says stop, or max_steps times.

        The body counts its steps itself, in int32: the number that ONNX gives it is int64.

        Args:
          keep_going: bool scalar.
          body: (emitter of the body, step as int32 scalar, carried tensors) -> (keep_going, carried).
        Returns: the carried tensors after the last step.
        """
        inner = self.child()
        step_spec, flag_spec = Spec((), np.int32), Spec((), bool)
        start = [self.constant(np.int32(0)), *carried]
        names = [self.unique(f"{self.scope}/loop/{i}".lstrip("/")) for i in range(len(start) + 2)]
        iteration, condition = names[0], names[1]
        inputs = [Tensor(name, tensor.spec) for name, tensor in zip(names[2:], start, strict=True)]
        again, results = body(inner, inputs[0], inputs[1:])
        assert [result.spec for result in results] == [tensor.spec for tensor in carried], f"{self.scope}: loop changes a shape"
        results = [inner.add(inputs[0], 1), *results]
        outputs = inner.finish([again, *results])
        infos = [value_info(iteration, Spec((), np.int64)), value_info(condition, flag_spec)]
        infos += [value_info(tensor.name, tensor.spec) for tensor in inputs]
        specs = [flag_spec, step_spec, *(tensor.spec for tensor in carried)]
        graph = self.onnx.GraphProto(
            name=self.unique(f"{self.scope}/body".lstrip("/")), node=live_nodes(inner.nodes, outputs), input=infos
        )
        graph.output.extend(value_info(name, spec) for name, spec in zip(outputs, specs, strict=True))
        count = self.constant(np.int64(max_steps))
        specs = [tensor.spec for tensor in start]
        return self.node("Loop", [count, keep_going, *start], specs, body=graph)[1:]

    def finish(self, results: Sequence[Tensor], names: Sequence[str] | None = None) -> list[str]:
        """Names of a graph's outputs: results of its own nodes, each another one. What is not so is copied.

        Args:
          names: what the outputs must be called; None for a body, where nobody looks at their names.
        """
        own = {name for node in self.nodes if node.op_type != "Constant" for name in node.output}
        outputs: list[str] = []
        for i, tensor in enumerate(results):
            name = self.reference(tensor)
            if names is not None or name not in own or name in outputs:
                copy = self.unique(names[i] if names is not None else "output")
                node = self.onnx.NodeProto(op_type="Identity", name=copy, input=[name], output=[copy])
                self._place(node)
                self.nodes.append(node)
                name = copy
            outputs.append(name)
        return outputs


def tensor_proto(array: np.ndarray, name: str = ""):
    """An array as a TensorProto in raw bytes, the one form that PopART and ONNX read alike for every dtype."""
    array = np.asarray(array, order="C")
    proto = load_onnx().TensorProto(name=name, data_type=ONNX_TYPES[array.dtype.name], dims=array.shape)
    proto.raw_data = array.astype(array.dtype.newbyteorder("<")).tobytes()
    return proto


def value_info(name: str, spec: Spec):
    """Name, type and shape of a graph's input or output."""
    info = load_onnx().ValueInfoProto(name=name)
    info.type.tensor_type.elem_type = ONNX_TYPES[spec.dtype.name]
    info.type.tensor_type.shape.SetInParent()  # a scalar has a shape too
    for size in spec.shape:
        info.type.tensor_type.shape.dim.add(dim_value=size)
    return info


def _check_dtype(dtype, where):
    if np.dtype(dtype).name not in ONNX_TYPES:
        more = "; set precision (and kv_cache) to fp16 or fp32" if np.dtype(dtype).name == "bfloat16" else ""
        raise UnsupportedError(f"{where}: backend popart has no {np.dtype(dtype).name} (has float32, float16){more}")


def live_nodes(nodes, outputs: Sequence[str]) -> list:
    """The nodes that a graph's outputs depend on, in their order."""
    needed, kept = set(outputs), []
    for node in reversed(nodes):
        if needed.intersection(node.output):
            needed |= _reads(node)
            kept.append(node)
    return kept[::-1]


def _reads(node) -> set[str]:
    """Names that a node, or the graphs in it, may take from the graph around."""
    names = set(node.input)
    for attribute in node.attribute:
        if attribute.type == attribute.GRAPH:
            names |= {output.name for output in attribute.g.output}
            for inner in attribute.g.node:
                names |= _reads(inner)
    return names

"""A model as the rules look at it: the proto with what the session says about it, and its graphs and nodes with places."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
import onnx
from onnx import AttributeProto
from popart_contract.standin import dtypes
from popart_contract.standin.facts import ABOUT_OPERATORS

ATTRIBUTE_TYPES = {
    AttributeProto.INT: "INT", AttributeProto.INTS: "INTS", AttributeProto.FLOAT: "FLOAT", AttributeProto.FLOATS: "FLOATS",
    AttributeProto.STRING: "STRING", AttributeProto.STRINGS: "STRINGS", AttributeProto.TENSOR: "TENSOR",
    AttributeProto.GRAPH: "GRAPH",
}  # fmt: skip


@dataclasses.dataclass(eq=False)
class GraphView:
    """A graph of the model.

    Attributes:
      proto: the GraphProto.
      path: where it is, "" for the main graph.
      parent: the graph around it; None for the main graph.
      owner: the node whose body it is.
    """

    proto: onnx.GraphProto
    path: str
    parent: GraphView | None = None
    owner: NodeView | None = None

    @property
    def is_body(self):
        return self.parent is not None

    @functools.cached_property
    def nodes(self) -> list[NodeView]:
        """Its nodes, in order."""
        return [NodeView(node, self, number) for number, node in enumerate(self.proto.node)]

    @functools.cached_property
    def constants(self) -> dict[str, NodeView]:
        """Constant nodes by the name of their tensor."""
        return {node.proto.output[0]: node for node in self.nodes if node.kind == "Constant" and node.domain == "ai.onnx"}

    @functools.cached_property
    def produced(self) -> set[str]:
        """Names that exist in this graph without looking outwards."""
        names = {entry.name for entry in (*self.proto.input, *self.proto.initializer)}
        return names | {name for node in self.proto.node for name in node.output if name}


@dataclasses.dataclass(eq=False)
class NodeView:
    """A node of the model and its place."""

    proto: onnx.NodeProto
    graph: GraphView
    number: int

    @property
    def kind(self):
        return self.proto.op_type

    @property
    def domain(self):
        return self.proto.domain or "ai.onnx"

    @property
    def is_op(self):
        """Whether it becomes an op: Constant nodes do not."""
        return not (self.kind == "Constant" and self.domain == "ai.onnx")

    @functools.cached_property
    def attributes(self) -> dict:
        """Values by name: Python values, arrays for tensors, GraphProtos for graphs."""
        return {attribute.name: attribute_value(attribute) for attribute in self.proto.attribute}

    @functools.cached_property
    def attribute_types(self) -> dict[str, str]:
        """ONNX types by name."""
        return {attribute.name: ATTRIBUTE_TYPES.get(attribute.type, "UNDEFINED") for attribute in self.proto.attribute}

    @functools.cached_property
    def bodies(self) -> list[GraphView]:
        """The graphs among its attributes."""
        found = [attribute.g for attribute in self.proto.attribute if attribute.type == AttributeProto.GRAPH]
        return [GraphView(proto, f"{self}/body", self.graph, self) for proto in found]

    def __str__(self):
        return f"{self.graph.path or 'main'}[{self.number}] {self.kind} {self.proto.name or list(self.proto.output)}"


def attribute_value(attribute):
    """One attribute in Python."""
    if attribute.type == AttributeProto.TENSOR:
        return attribute.t
    value = onnx.helper.get_attribute_value(attribute)
    if attribute.type == AttributeProto.STRING:
        return value.decode()
    if attribute.type == AttributeProto.STRINGS:
        return [item.decode() for item in value]
    return list(value) if attribute.type in (AttributeProto.INTS, AttributeProto.FLOATS) else value


@dataclasses.dataclass(eq=False)
class ModelView:
    """A proto, and what the session says about it.

    Attributes:
      proto: the ModelProto.
      options: SessionOptions.
      num_ipus: of the device.
      device_type: name of its DeviceType.
      data_flow: DataFlow.
      shapes: InputShapeInfo.
      is_3_2: whether the SDK is 3.2.
    """

    proto: onnx.ModelProto
    options: object
    num_ipus: int
    device_type: str
    data_flow: object
    shapes: object
    is_3_2: bool = False

    @functools.cached_property
    def main(self) -> GraphView:
        return GraphView(self.proto.graph, "")

    def graphs(self) -> Iterator[GraphView]:
        """All graphs, outer ones first."""
        pending = [self.main]
        while pending:
            graph = pending.pop(0)
            yield graph
            pending += [body for node in graph.nodes for body in node.bodies]

    def nodes(self) -> Iterator[NodeView]:
        """All nodes of all graphs."""
        for graph in self.graphs():
            yield from graph.nodes

    @functools.cached_property
    def opsets(self) -> dict[str, int]:
        """Domain -> version, the defaults for those that the model does not list: FACTS (g, h)."""
        listed = {entry.domain or "ai.onnx": entry.version for entry in self.proto.opset_import}
        return dict(ABOUT_OPERATORS["default_opset"]) | listed

    @functools.cached_property
    def metadata(self) -> dict[str, str]:
        return {entry.key: entry.value for entry in self.proto.metadata_props}

    @functools.cached_property
    def initializers(self) -> dict[str, onnx.TensorProto]:
        return {tensor.name: tensor for tensor in self.proto.graph.initializer}

    @functools.cached_property
    def streams(self) -> dict[str, onnx.ValueInfoProto]:
        """Main graph inputs that the host feeds."""
        return {entry.name: entry for entry in self.proto.graph.input if entry.name not in self.initializers}

    @functools.cached_property
    def used(self) -> set[str]:
        """Every name that some node takes."""
        return {name for node in self.nodes() for name in node.proto.input if name}

    @property
    def replicas(self) -> int:
        """R: FACTS (b)."""
        return self.options.getGlobalReplicationFactor()

    @property
    def ipus_per_replica(self) -> int:
        return self.num_ipus // max(self.replicas, 1)

    def number(self, key: str, name: str, default: int) -> int | None:
        """A decimal integer of the metadata; None where it is none."""
        text = self.metadata.get(f"{key}/{name}")
        if text is None:
            return default
        return int(text) if text.lstrip("-").isdecimal() else None

    def group(self, name: str) -> VariableGroup:
        """How an initializer is spread over the replicas."""
        kind = self.number("__comm_group_type", name, 0)
        size = self.number("__comm_group_size", name, 0)
        return VariableGroup(kind, size, self.number("__variable_settings", name, 0), self.replicas)


@dataclasses.dataclass(frozen=True)
class VariableGroup:
    """VariableSettings as the metadata gives them: FACTS (b). Numbers that cannot be read are None."""

    kind: int | None
    size: int | None
    mode: int | None
    replicas: int

    @property
    def is_sound(self):
        """Whether the numbers mean something."""
        is_known = self.kind in (0, 1, 2, 3) and self.mode in (0, 2) and self.size is not None and self.size >= 0
        return is_known and not (self.kind in (1, 2) and (self.size == 0 or self.replicas % self.size))

    @property
    def count(self) -> int:
        """G."""
        if self.kind == 0:
            return 1
        return self.replicas if self.kind == 3 or self.size == 1 else self.replicas // self.size

    def group_of(self, replica: int) -> int:
        """Which group a replica belongs to."""
        if self.count == 1:
            return 0
        if self.count == self.replicas:
            return replica
        return replica // self.size if self.kind == 1 else replica % self.count


def tensor_array(tensor: onnx.TensorProto, read_external=None) -> np.ndarray:
    """The numbers of a TensorProto, as PopART reads them: raw bytes, external bytes, or typed fields it understands."""
    name = dtypes.ONNX_NAMES[tensor.data_type]
    dtype, shape = dtypes.NUMPY[name], tuple(tensor.dims)
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        raw = read_external(tensor)
    elif tensor.HasField("raw_data"):
        raw = tensor.raw_data
    elif name in ("FLOAT16", "INT8", "UINT8", "INT16", "UINT16", "BOOL"):
        raw = np.asarray(tensor.int32_data, "<i4").tobytes()
    elif name == "UINT32":
        raw = np.asarray(tensor.uint64_data, "<u8").tobytes()
    else:
        field = {"FLOAT": "float_data", "INT32": "int32_data", "INT64": "int64_data", "DOUBLE": "double_data"}.get(name)
        raw = np.asarray(getattr(tensor, field or "uint64_data"), dtype).tobytes()
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(raw[: count * dtype.itemsize], dtype.newbyteorder("<")).astype(dtype, copy=False).reshape(shape)

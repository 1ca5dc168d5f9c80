"""FACTS (i): what is easy to get wrong."""

from __future__ import annotations

import numpy as np
import onnx
from popart_contract.standin import dtypes
from popart_contract.standin.facts import ABOUT_OPERATORS
from popart_contract.standin.rules import model_rule, node_rule

RESERVED = ("Step___", "Init___", "Index___", "Accum___", "Accl___", "Gradient___", "Iterator___", "LoopCond___",
            "ConstValue___", "Stashed___", "Restored___", "lossScaling_", "randomSeed___")  # fmt: skip
PACKED = ("FLOAT16", "INT8", "UINT8", "INT16", "UINT16", "UINT32")  # typed fields hold bytes, not numbers
SAME_TYPES = ("Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "Sum", "Mean", "Where")
# operator -> places of the operands that belong together; () for all
JOINED_TYPES = {
    "MatMul": (0, 1), "Equal": (), "Less": (), "Greater": (), "Concat": (), "DynamicUpdate": (0, 2), "DynamicAdd": (0, 2),
    "Scatter": (0, 2), "BitwiseAnd": (), "BitwiseOr": (), "BitwiseXor": (), "BitwiseXnor": (), "Fmod": (), "Atan2": (),
}  # fmt: skip


def _stored(model):
    """(name, TensorProto, whether it is a Constant node's)."""
    for name, tensor in model.initializers.items():
        yield name, tensor, False
    for node in model.nodes():
        if node.kind == "Constant" and isinstance(node.attributes.get("value"), onnx.TensorProto):
            yield str(node), node.attributes["value"], True


def _has_typed_fields(tensor):
    return tensor.data_location != onnx.TensorProto.EXTERNAL and not tensor.HasField("raw_data")


@model_rule
def fact_i_tensors_have_raw_data(model):
    """Typed fields of small types are read as packed bytes, unlike what ONNX's writers put there."""
    for name, tensor, _ in _stored(model):
        kind = dtypes.ONNX_NAMES.get(tensor.data_type)
        if _has_typed_fields(tensor) and (kind in PACKED or (kind == "BOOL" and len(tensor.int32_data) < 2)):
            yield f"{name}: {kind} in a typed field; write raw_data"


@model_rule
def fact_i_raw_data_has_every_element(model):
    """As many bytes as the shape says."""
    for name, tensor, _ in _stored(model):
        dtype = dtypes.NUMPY.get(dtypes.ONNX_NAMES.get(tensor.data_type))
        wanted = int(np.prod(tensor.dims, dtype=np.int64)) * (dtype.itemsize if dtype else 0)
        if tensor.data_location != onnx.TensorProto.EXTERNAL and tensor.HasField("raw_data") and len(tensor.raw_data) != wanted:
            yield f"{name}: {len(tensor.raw_data)} bytes of raw_data, wanted {wanted}"


@model_rule
def fact_i_bool_constants_are_scalars(model):
    """A BOOL Constant is copied as 4 bytes per element: past the end of raw_data where it has more than one."""
    for name, tensor, is_constant in _stored(model):
        count = int(np.prod(tensor.dims, dtype=np.int64))
        is_bool = tensor.data_type == onnx.TensorProto.BOOL
        if is_constant and is_bool and count > 1 and (tensor.HasField("raw_data") or len(tensor.int32_data) < count):
            yield f"{name}: a BOOL Constant of {count} elements; make it from INT32 with a Cast or a comparison"


@node_rule
def fact_i_arithmetic_has_one_type(node):
    """Arithmetic and Where want identical types: INT64 beside INT32 raises. Comparisons do not check."""
    if node.kind in SAME_TYPES and node.domain == "ai.onnx":
        given = node.inputs[1:] if node.kind == "Where" else node.inputs
        if len({tensor.dtype for tensor in given}) > 1:
            yield f"operands are {', '.join(map(str, given))}"


@node_rule
def strict_other_operands_have_one_type(node):
    """Products, comparisons and what joins tensors: no fact says that mixed types are refused, and none that they work.

    64-bit integers count as what they are narrowed to.
    """
    if node.kind in JOINED_TYPES:
        given = [node.inputs[place] for place in JOINED_TYPES[node.kind]] if JOINED_TYPES[node.kind] else node.inputs
        if len({tensor.dtype.replace("64", "32") for tensor in given}) > 1:
            yield f"operands are {', '.join(map(str, given))}"


@node_rule
def fact_i_topk_k_is_one_int64(node):
    """K is INT64 and has one element; that it is constant is the rule of all such inputs."""
    if node.kind == "TopK" and len(node.inputs) > 1:
        k = node.inputs[1]
        if k.dtype != "INT64" or int(np.prod(k.shape, dtype=np.int64)) != 1:
            yield f"K is {k}"


@model_rule
def fact_i_topk_outputs_are_named(model):
    """Both outputs of TopK must be named."""
    for node in model.nodes():
        if node.kind == "TopK" and len([name for name in node.proto.output if name]) != 2:
            yield f"{node}: outputs {list(node.proto.output)}"


@node_rule
def fact_i_shapes_and_limits_are_constant(node):
    """Shape, axis and limit inputs are constants: Constant nodes of the same graph, or initializers in the main graph.

    In 3.2 a constant of the graph around a body arrives there as an ordinary input.
    """
    for place in node.known.get("constant", ()) if node.kind != "Loop" else ():
        if place < len(node.inputs) and node.inputs[place] is not None:
            given = node.inputs[place]
            if given.array is None:
                yield f"input {place} is {given}, which is not constant"
            elif node.is_body and given.graph_path != node.graph_path:
                yield f"input {place} is a constant of another graph; put a Constant node into this one"


@node_rule
def fact_i_pads_are_int64_and_limits_float(node):
    """Pad-11 wants INT64 pads and a FLOAT value, Clip-11 FLOAT limits, even for FLOAT16 data."""
    if node.version == 11 and node.kind in ("Pad", "Clip"):
        for place, given in enumerate(node.inputs[1:], 1):
            wanted = "INT64" if node.kind == "Pad" and place == 1 else "FLOAT"
            if given is not None and given.dtype != wanted:
                yield f"input {place} is {given}, wanted {wanted}"


@node_rule
def fact_i_collective_groups_are_three_types(node):
    """A comm group has type 0 .. 2."""
    group = node.attributes.get("__collectiveCommGroup")
    if group and not 0 <= group[0] <= 2:
        yield f"__collectiveCommGroup {group}"


@model_rule
def fact_i_operators_are_in_3_2(model):
    """GroupedGather, GeluErf, NearbyInt, Sort, Bucketize, ScatterElements came after 3.2."""
    for node in model.nodes() if model.is_3_2 else ():
        if node.kind in ABOUT_OPERATORS["absent_in_3_2"].get(node.domain, ()):
            yield f"{node}: 3.2 has no {node.kind}"


@model_rule
def fact_i_grouped_gather_keeps_the_group_axis(model):
    """With group_size > 1 axis 0 is the group, and is refused as the axis."""
    for node in model.nodes():
        if node.kind in ("Gather", "GroupedGather") and node.attributes.get("group_size", 1) > 1:
            if node.attributes.get("axis", 0) == 0:
                yield f"{node}: axis 0 with group_size {node.attributes['group_size']}"


@model_rule
def fact_i_random_nodes_have_no_seed(model):
    """RandomNormal and RandomUniform raise when `seed` is present."""
    for node in model.nodes():
        if node.kind in ("RandomNormal", "RandomUniform") and "seed" in node.attributes:
            yield f"{node}: seed is set; use session.setRandomSeed"


@model_rule
def fact_i_names_hold_no_reserved_prefix(model):
    """Main graph inputs and outputs must not contain one."""
    for entry in (*model.proto.graph.input, *model.proto.graph.output):
        for prefix in RESERVED:
            if prefix in entry.name:
                yield f"{entry.name} contains {prefix}"


@node_rule
def fact_i_dynamic_index_has_an_element_for_each_axis(node):
    """DynamicSlice and DynamicUpdate want exactly as many index elements as axes."""
    if node.kind in ("DynamicSlice", "DynamicUpdate") and node.domain == "ai.graphcore":
        index, axes = node.inputs[1], node.attributes.get("axes", [])
        if int(np.prod(index.shape, dtype=np.int64)) != len(axes):
            yield f"the index is {index}, there are {len(axes)} axes"

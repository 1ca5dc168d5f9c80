"""FACTS (h): what the loader wants of the proto itself."""

from __future__ import annotations

import os

import onnx
from popart_contract.standin import dtypes
from popart_contract.standin.facts import ABOUT_OPERATORS
from popart_contract.standin.rules import model_rule


@model_rule
def fact_h_ir_version_is_4(model):
    """The Builder writes IR version 4 (3 for old opsets); nothing checks it, and newer forms mean other things."""
    if model.proto.ir_version != 4:
        yield f"ir_version is {model.proto.ir_version}, wanted 4"


@model_rule
def fact_h_opset_is_10_or_11(model):
    """ai.onnx beyond opset 11 makes every op raise; the advice is 10 or 11."""
    if model.opsets["ai.onnx"] not in (10, 11):
        yield f"ai.onnx opset {model.opsets['ai.onnx']}, wanted 10 or 11"


@model_rule
def fact_h_graphcore_opset_is_1(model):
    """ai.graphcore has version 1 alone."""
    most = ABOUT_OPERATORS["max_opset"]["ai.graphcore"]
    if model.opsets["ai.graphcore"] != most:
        yield f"ai.graphcore opset {model.opsets['ai.graphcore']}, wanted {most}"


@model_rule
def fact_h_inputs_have_static_shapes(model):
    """A symbolic, negative or missing dimension raises, unless InputShapeInfo has the input."""
    for name, entry in model.streams.items():
        if model.shapes.has(name):
            continue
        kind = entry.type.tensor_type
        if not kind.HasField("shape") or not kind.elem_type:
            yield f"input {name} has no shape or type"
        elif any(not dimension.HasField("dim_value") or dimension.dim_value < 0 for dimension in kind.shape.dim):
            yield f"input {name} has an open shape: {[d.dim_param or d.dim_value for d in kind.shape.dim]}"


@model_rule
def fact_h_input_names_are_unique(model):
    """A repeated graph input name raises."""
    names = [entry.name for entry in model.proto.graph.input]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"graph input {name} is listed {names.count(name)} times"


@model_rule
def fact_h_external_data_can_be_read(model):
    """Location, offset and length are there, the length is more than 0, and the file is where the working directory says."""
    for name, tensor in model.initializers.items():
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        where = {entry.key: entry.value for entry in tensor.external_data}
        lacking = sorted({"location", "offset", "length"} - set(where))
        if lacking:
            yield f"{name}: external_data lacks {lacking}"
            continue
        offset, length = int(where["offset"]), int(where["length"])
        wanted = dtypes.NUMPY[dtypes.ONNX_NAMES[tensor.data_type]].itemsize
        for size in tensor.dims:
            wanted *= size
        if length <= 0 or offset < 0:
            yield f"{name}: external_data has offset {offset} and length {length}"
        elif length != wanted:
            yield f"{name}: external_data has {length} bytes, the tensor {wanted}"
        elif not os.path.isfile(where["location"]):
            yield f"{name}: no file {where['location']!r} in the working directory"
        elif os.path.getsize(where["location"]) < offset + length:
            yield f"{name}: {where['location']} ends before {offset + length}"

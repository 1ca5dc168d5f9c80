"""FACTS (e): element types and float8."""

from __future__ import annotations

from popart_contract.standin import dtypes
from popart_contract.standin.rules import model_rule, node_rule

FLOAT8 = ("FLOAT8_143", "FLOAT8_152")


def _tensors(model):
    """(name, type) of all typed tensors: streams, initializers, constants and casts."""
    for name, tensor in model.initializers.items():
        yield name, dtypes.ONNX_NAMES.get(tensor.data_type, str(tensor.data_type))
    for name, entry in model.streams.items():
        if not model.shapes.has(name):
            number = entry.type.tensor_type.elem_type
            yield name, dtypes.ONNX_NAMES.get(number, str(number))
    for node in model.nodes():
        if node.kind == "Constant" and "value" in node.attributes:
            yield node, dtypes.ONNX_NAMES.get(node.attributes["value"].data_type)


@model_rule
def fact_e_types_are_imported(model):
    """ONNX's own float8 types, and what else came later, raise."""
    for name, kind in _tensors(model):
        if kind not in dtypes.IMPORTED:
            yield f"{name}: unrecognised ONNX DataType {kind}"


@model_rule
def fact_e_types_reach_the_device(model):
    """DOUBLE, BFLOAT16, COMPLEX, STRING and UNDEFINED are not lowered; 64-bit integers only with the cast."""
    allowed = dtypes.LOWERED | (dtypes.NARROWED if model.options.enableSupportedDataTypeCasting else set())
    for name, kind in _tensors(model):
        if kind in dtypes.IMPORTED and kind not in allowed:
            yield f"{name}: {kind} is not lowered"


@node_rule
def fact_e_casts_reach_the_device(node):
    """Cast goes to a type that a device has."""
    if node.kind == "Cast":
        kind = dtypes.ONNX_NAMES.get(node.attributes.get("to"))
        allowed = node.known["attributes"]["to"].get("allowed", "").split("|")
        if kind not in allowed:
            yield f"to is {kind}, wanted one of {allowed}"


@node_rule
def fact_e_float8_matmul_has_a_scale(node):
    """Both operands are float8 and a third input, an INT32 scalar of rank 0, scales; other operands must not have it."""
    if node.kind != "MatMul" or node.domain != "ai.onnx":
        return
    are_float8 = [given.dtype in FLOAT8 for given in node.inputs[:2]]
    scale = node.inputs[2] if len(node.inputs) > 2 else None
    if all(are_float8):
        if scale is None or scale.dtype != "INT32" or scale.shape != ():
            yield f"float8 operands need an INT32 scalar as third input, given {scale}"
    elif any(are_float8):
        yield "one operand is float8, the other is not"
    elif scale is not None:
        yield "a scale, but the operands are not float8"


@node_rule
def fact_e_float8_matmul_gives_float16(node):
    """`__partials_type` is half, and `__output_type`, if given, FLOAT16."""
    if node.kind == "MatMul" and node.inputs[0].dtype in FLOAT8:
        partials, output = (node.attributes.get(f"__{name}_type") for name in ("partials", "output"))
        if str(partials).lower() != "half" or output not in (None, "FLOAT16"):
            yield f"__partials_type {partials} and __output_type {output}, wanted half and FLOAT16"


@node_rule
def fact_e_pow2scale_names_a_float8_type(node):
    """Pow2ScaleThenCast has `to`, the name of a float8 type; the scale is one INT32."""
    if node.kind == "Pow2ScaleThenCast" and node.attributes.get("to") not in FLOAT8:
        yield f"to is {node.attributes.get('to')!r}, wanted one of {FLOAT8}"


@node_rule
def fact_e_pow2scale_takes_float16_in_3_2(node):
    """In 3.2 Pow2ScaleThenCast declares FLOAT16 only."""
    if node.is_3_2 and node.kind == "Pow2ScaleThenCast" and node.inputs[0].dtype != "FLOAT16":
        yield f"the input is {node.inputs[0]}, 3.2 takes FLOAT16"

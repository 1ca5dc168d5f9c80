"""Cases of standin/rules/pitfalls.py."""

from __future__ import annotations

import numpy as np
from onnx import helper
from popart_contract.cases import case
from popart_contract.protos import (
    BOOL,
    FLOAT,
    FLOAT16,
    GRAPHCORE,
    INT32,
    Given,
    body,
    constant,
    loop,
    model,
    node,
    tensor,
    trip_constants,
    value,
)


def _constant_plus(stored, kind=FLOAT16):
    """x + a Constant whose TensorProto is given."""
    return Given(model([node("Constant", "", "c", value=stored), node("Add", "x c", "y")], [value("x", kind, (2,))]))


@case
def fact_i_tensors_have_raw_data():
    ones = np.ones(2, np.float16)
    return _constant_plus(helper.make_tensor("c", FLOAT16, (2,), ones)), _constant_plus(tensor("c", ones))


@case
def fact_i_raw_data_has_every_element():
    broken = tensor("c", np.ones(2, np.float16))
    broken.raw_data = broken.raw_data[:2]
    return _constant_plus(broken), _constant_plus(tensor("c", np.ones(2, np.float16)))


@case
def fact_i_bool_constants_are_scalars():
    """The mask is made from INT32 on the device."""
    mask = np.array([True, False, True])
    choose = node("Where", "mask x x", "y")
    fixed = [constant("numbers", mask.astype(np.int32)), node("Cast", "numbers", "mask", to=BOOL), choose]
    return Given(model([constant("mask", mask), choose])), Given(model(fixed))


@case
def fact_i_arithmetic_has_one_type():
    """A comparison of the two does not check."""
    inputs = [value("x", INT32, (2,))]
    add = [model([constant("c", np.array([1], kind)), node("Add", "x c", "y")], inputs) for kind in (np.int64, np.int32)]
    return Given(add[0]), Given(add[1])


@case
def strict_other_operands_have_one_type():
    """FLOAT16 times FLOAT."""
    inputs = [value("x", FLOAT16, (2, 3)), value("z", FLOAT16, (3, 1))]
    wide = node("Cast", "x", "h", to=FLOAT)
    products = [[wide, node("MatMul", "h z", "y")], [wide, node("Cast", "z", "g", to=FLOAT), node("MatMul", "h g", "y")]]
    return tuple(Given(model(nodes, inputs)) for nodes in products)


@case
def strict_other_operands_have_one_type__compared_with_int64():
    """That is narrowed to INT32 first."""
    inputs = [value("x", INT32, (2,))]
    made = [model([constant("c", np.array([1], kind)), node("Less", "x c", "y")], inputs) for kind in (np.float32, np.int64)]
    return Given(made[0]), Given(made[1])


def _topk(k, outputs="y places", anchors=("y",)):
    return Given(model([constant("k", k), node("TopK", "x k", outputs)]), anchors=anchors)


@case
def fact_i_topk_k_is_one_int64():
    return _topk(np.array([1, 2])), _topk(np.array([2]))


@case
def fact_i_topk_outputs_are_named():
    return _topk(np.array([2]), ["y", ""]), _topk(np.array([2]))


@case
def fact_i_shapes_and_limits_are_constant():
    """A constant of the graph around a body is an ordinary input inside, in 3.2."""

    def made(outside, inside):
        reshape = node("Reshape", "value sizes", "next")
        return Given(model([*trip_constants(), *outside, loop(body=body([*inside, reshape]))]))

    sizes = [constant("sizes", np.array([2, 3]))]
    return made(sizes, []), made([], sizes)


@case
def fact_i_pads_are_int64_and_limits_float():
    """Clip-11 of FLOAT16."""

    def made(kind):
        limits = [constant("low", kind(0)), constant("high", kind(1))]
        return Given(model([*limits, node("Clip", "x low high", "y")], [value("x", FLOAT16, (2,))], opset=11))

    return made(np.float16), made(np.float32)


@case
def fact_i_collective_groups_are_three_types():
    made = [model([node("ReplicatedAllReduce", "x", "y", GRAPHCORE, __collectiveCommGroup=[kind, 0])]) for kind in (3, 0)]
    return Given(made[0]), Given(made[1])


@case
def fact_i_operators_are_in_3_2():
    made = model([node("GeluErf", "x", "y", GRAPHCORE)])
    return Given(made, sdk="3.2.0"), Given(made, sdk="3.4.0")


@case
def fact_i_grouped_gather_keeps_the_group_axis():
    inputs = [value("x", FLOAT, (2, 5, 3)), value("i", INT32, (2, 4))]
    made = [model([node("Gather", "x i", "y", axis=axis, group_size=2)], inputs) for axis in (0, 1)]
    return Given(made[0]), Given(made[1])


@case
def fact_h_required_attributes_are_there__print_tensor():
    """PrintTensor needs its numbers, though it has a default for the title: FACTS (i)."""
    numbers = dict.fromkeys(("summariseThreshold", "edgeItems", "maxLineWidth", "digits", "floatFormat"), 1)
    marks = dict.fromkeys(("separator", "openBracket", "closeBracket"), 32)
    made = [model([node("PrintTensor", "x", "y", GRAPHCORE, **attributes)]) for attributes in (numbers, numbers | marks)]
    return Given(made[0]), Given(made[1])


@case
def fact_i_random_nodes_have_no_seed():
    made = [
        model([node("RandomNormal", "", "r", shape=[2, 3], **seed), node("Add", "x r", "y")]) for seed in ({"seed": 1.0}, {})
    ]
    return Given(made[0]), Given(made[1])


@case
def fact_i_names_hold_no_reserved_prefix():
    made = [
        model([node("Add", f"{name} {name}", "y")], [value(name, FLOAT, (2,))]) for name in ("model.Step___1", "model.Step_1")
    ]
    return Given(made[0]), Given(made[1])


@case
def fact_i_dynamic_index_has_an_element_for_each_axis():
    inputs = [value("x", FLOAT, (2, 3)), value("i", INT32, (2,))]
    attributes = [{"axes": [0], "sizes": [1]}, {"axes": [0, 1], "sizes": [1, 2]}]
    made = [model([node("DynamicSlice", "x i", "y", GRAPHCORE, **choice)], inputs) for choice in attributes]
    return Given(made[0]), Given(made[1])

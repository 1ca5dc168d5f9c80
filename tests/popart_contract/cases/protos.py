"""Cases of standin/rules/protos.py."""

from __future__ import annotations

import numpy as np
from onnx import StringStringEntryProto, TensorProto
from popart_contract.cases import case
from popart_contract.protos import FLOAT, Given, model, node, value

ADD = node("Add", "x x", "y")


@case
def fact_h_ir_version_is_4():
    return Given(model([ADD], ir_version=8)), Given(model([ADD]))


@case
def fact_h_opset_is_10_or_11():
    return Given(model([ADD], opset=13)), Given(model([ADD], opset=11))


@case
def fact_h_graphcore_opset_is_1():
    broken = model([ADD])
    broken.opset_import[1].version = 2
    return Given(broken), Given(model([ADD]))


@case
def fact_h_inputs_have_static_shapes():
    """InputShapeInfo can close what the model leaves open."""
    made = model([ADD], [value("x", FLOAT, ("batch", 3))])
    return Given(made), Given(made, shapes={"x": ("FLOAT", [2, 3])})


@case
def fact_h_input_names_are_unique():
    x = value("x", FLOAT, (2, 3))
    return Given(model([ADD], [x, x])), Given(model([ADD], [x]))


@case
def fact_h_external_data_can_be_read():
    """The test's working directory holds weights.bin with 64 bytes."""

    def made(**where):
        proto = model([node("Add", "x w", "y")], weights={"w": np.ones(3, np.float32)})
        weight = proto.graph.initializer[0]
        weight.ClearField("raw_data")
        weight.data_location = TensorProto.EXTERNAL
        for key, text in where.items():
            weight.external_data.append(StringStringEntryProto(key=key, value=text))
        return Given(proto)

    return made(location="weights.bin", offset="0"), made(location="weights.bin", offset="16", length="12")

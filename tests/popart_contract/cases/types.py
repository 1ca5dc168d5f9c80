"""Cases of standin/rules/types.py."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto
from popart_contract.cases import case
from popart_contract.protos import FLOAT, FLOAT16, GRAPHCORE, INT64, Given, constant, model, node, value

EIGHT = "FLOAT8_143"


@case
def fact_e_types_are_imported():
    """ONNX's own float8 types raise."""
    made = [model([node("Identity", "x", "y")], [value("x", kind, (2,))]) for kind in (TensorProto.FLOAT8E4M3FN, FLOAT)]
    return Given(made[0]), Given(made[1])


@case
def fact_e_types_reach_the_device():
    """INT64 does while it is cast to 32 bits, DOUBLE never."""
    made = model([node("Identity", "x", "y")], [value("x", INT64, (2,))])
    return Given(made, {"enableSupportedDataTypeCasting": False}), Given(made)


@case
def fact_e_casts_reach_the_device():
    return tuple(Given(model([node("Cast", "x", "y", to=kind)])) for kind in (TensorProto.DOUBLE, FLOAT16))


def _float8(more=" s", scale=None, to=EIGHT, **attributes):
    """x @ w, both cast to float8, with one scale for everything."""
    attributes = {"__partials_type": "half"} | attributes
    nodes = [
        constant("s", np.int32(0) if scale is None else scale),
        constant("zero", np.int32(0)),
        constant("w", np.ones((3, 2), np.float16)),
        node("Pow2ScaleThenCast", "x zero", "x8", GRAPHCORE, to=to),
        node("Pow2ScaleThenCast", "w zero", "w8", GRAPHCORE, to=to),
        node("MatMul", f"x8 w8{more}", "y", **attributes),
    ]
    return Given(model(nodes, [value("x", FLOAT16, (2, 3))]))


@case
def fact_e_float8_matmul_has_a_scale():
    return _float8(more=""), _float8()


@case
def fact_e_float8_matmul_gives_float16():
    return _float8(__output_type="FLOAT"), _float8(__output_type="FLOAT16")


@case
def fact_e_pow2scale_names_a_float8_type():
    return _float8(to="F143"), _float8()


@case
def fact_e_pow2scale_takes_float16_in_3_2():
    made = model([constant("s", np.int32(0)), node("Pow2ScaleThenCast", "x s", "h", GRAPHCORE, to=EIGHT),
                  constant("t", np.int32(0)), node("CastThenPow2Scale", "h t", "y", GRAPHCORE, to=FLOAT16)])  # fmt: skip
    return Given(made, sdk="3.2.0"), Given(made, sdk="3.4.0")

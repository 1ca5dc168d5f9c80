"""Cases of standin/rules/operators.py."""

from __future__ import annotations

import dataclasses

from onnx import helper
from popart_contract.cases import CASES, case
from popart_contract.protos import BOOL, FLOAT, GRAPHCORE, INT32, Given, model, node, value


def _one(kind, inputs="x", outputs="y", domain="", **attributes):
    return Given(model([node(kind, inputs, outputs, domain, **attributes)]))


@case
def fact_g_custom_domains_are_listed():
    """Listed, the domain is known; the operator still has no class, so the fixed model uses one that has."""
    opsets = [helper.make_opsetid("custom.ops", 1)]
    broken = model([node("Add", "x x", "h"), node("KVCache", "h", "y", "custom.ops")])
    return Given(broken), Given(model([node("Add", "x x", "y")], more_opsets=opsets))


@case
def fact_h_operators_have_a_class():
    return _one("Gelu"), _one("Gelu", domain=GRAPHCORE)


@case
def fact_h_operator_versions_are_accepted():
    """Scatter is registered, but opset 11 has ScatterElements in its place."""
    inputs = [value("x", FLOAT, (3,)), value("i", INT32, (2,)), value("u", FLOAT, (2,))]
    made = [model([node(kind, "x i u", "y", axis=0)], inputs, opset=11) for kind in ("Scatter", "ScatterElements")]
    return Given(made[0]), Given(made[1])


@case
def fact_h_operator_versions_are_accepted__unless_not_strict():
    """Without strictOpVersions a version that is registered at all does."""
    broken, _ = CASES["fact_h_operator_versions_are_accepted"]()
    return broken, dataclasses.replace(broken, options={"strictOpVersions": False})


@case
def strict_attributes_are_known():
    """Split-2 has `split`; `num_outputs` came with opset 18."""
    return _one("Split", outputs="y z", axis=0, num_outputs=2), _one("Split", outputs="y z", axis=0, split=[1, 1])


@case
def fact_h_attributes_have_their_type():
    return _one("Softmax", axis=[1]), _one("Softmax", axis=1)


@case
def fact_h_required_attributes_are_there():
    return _one("Cast"), _one("Cast", to=10)


@case
def fact_h_input_and_output_counts_fit():
    return _one("Add", "x x x"), _one("Add", "x x")


@case
def fact_i_input_types_are_declared():
    """Not takes BOOL."""
    fixed = model([node("Not", "x", "y")], [value("x", BOOL, (2,))])
    return Given(model([node("Not", "x", "y")], [value("x", FLOAT, (2,))])), Given(fixed)

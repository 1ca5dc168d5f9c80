"""Cases of standin/rules/replicas.py."""

from __future__ import annotations

import numpy as np
from onnx import helper
from popart_contract.cases import case
from popart_contract.protos import FLOAT, Given, model, node, value

FOUR = {"enableReplicatedGraphs": True, "replicatedGraphCount": 4}


def _grouped(shape, kind=None, size=None, settings=None, name="w", inputs=None):
    """x + w on 4 replicas, with the metadata of w."""
    keys = {"__comm_group_type": kind, "__comm_group_size": size, "__variable_settings": settings}
    metadata = {f"{key}/{name}": str(number) for key, number in keys.items() if number is not None}
    made = model([node("Add", "x w", "y")], inputs, weights={"w": np.ones(shape, np.float32)}, metadata=metadata)
    return Given(made, FOUR, ("Ipu", 4))


@case
def fact_b_replicas_need_the_option():
    made = model([node("Add", "x x", "y")])
    broken = Given(made, {"replicatedGraphCount": 4}, ("Ipu", 4))
    return broken, Given(made, FOUR, ("Ipu", 4))


@case
def fact_b_group_settings_are_enum_numbers():
    """Retrieval mode 1, AllReduceReplicas, is not supported."""
    return _grouped((4, 3), 1, 1, 1), _grouped((4, 3), 1, 1, 0)


@case
def fact_b_groups_have_a_size():
    return _grouped((2, 3), 2, 0, 0), _grouped((2, 3), 2, 2, 0)


@case
def strict_groups_divide_the_replicas():
    return _grouped((1, 3), 1, 3, 0), _grouped((2, 3), 1, 2, 0)


@case
def fact_b_leading_dimension_is_the_group_count():
    """In the graph input of the weight too."""
    listed = [[value("x", FLOAT, (2, 3)), value("w", FLOAT, shape)] for shape in ((3,), (4, 3))]
    return tuple(_grouped((4, 3), 1, 1, 0, inputs=inputs) for inputs in listed)


@case
def strict_variable_metadata_names_an_initializer():
    broken, fixed = _grouped((4, 3), 1, 1, 0), _grouped((4, 3), 1, 1, 0)
    helper.set_model_props(broken.proto, {**{entry.key: entry.value for entry in broken.proto.metadata_props},
                                          "__comm_group_type/W": "1"})  # fmt: skip
    return broken, fixed

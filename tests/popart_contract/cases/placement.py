"""Cases of standin/rules/placement.py."""

from __future__ import annotations

import numpy as np
from onnx import helper
from popart_contract.cases import case
from popart_contract.protos import GRAPHCORE, Given, body, constant, loop, model, node, trip_constants

MANUAL = {"virtualGraphMode": "Manual"}


def _add(**attributes):
    return model([node("Add", "x x", "y", **attributes)])


def _both(broken, fixed, **given):
    return Given(broken, **given), Given(fixed, **given)


@case
def fact_a_annotations_have_their_type():
    return _both(_add(__ipu_number=0.0), _add(__ipu_number=0))


@case
def fact_a_all_ops_have_an_ipu_or_none():
    """The Loop itself and the nodes of its body count, Constant nodes do not."""

    def made(inner):
        looped = body([node("Add", "value value", "next", **inner)])
        return model([*trip_constants(), loop(body=looped, __ipu_number=0)])

    return _both(made({}), made({"__ipu_number": 0}), options=MANUAL)


@case
def fact_a_manual_mode_needs_annotations():
    return _both(_add(), _add(__ipu_number=0), options=MANUAL)


@case
def fact_a_ipu_numbers_are_in_range():
    """Counted within a replica: 4 IPUs of 2 replicas are 0 and 1."""
    options = MANUAL | {"enableReplicatedGraphs": True, "replicatedGraphCount": 2}
    return _both(_add(__ipu_number=2), _add(__ipu_number=1), options=options, device=("Ipu", 4))


@case
def fact_a_replicas_share_the_ipus():
    options = {"enableReplicatedGraphs": True}
    broken, fixed = options | {"replicatedGraphCount": 3}, options | {"replicatedGraphCount": 2}
    manual = _add(__ipu_number=0)
    return tuple(Given(manual, MANUAL | choice, device=("Ipu", 4)) for choice in (broken, fixed))


@case
def fact_a_several_ipus_need_virtual_graphs():
    return Given(_add(), device=("Ipu", 2)), Given(_add(__ipu_number=1), MANUAL, device=("Ipu", 2))


@case
def fact_a_pipeline_stages_are_not_negative():
    return _both(_add(__pipeline_stage=-1), _add(__pipeline_stage=0))


@case
def fact_a_outline_is_pairs():
    return _both(_add(__outline=["layer"]), _add(__outline=["layer", "3"]))


@case
def fact_a_output_location_is_six_numbers():
    return _both(_add(__output_tensor_location=[0, 0]), _add(__output_tensor_location=[0, 0, 0, 0, 0, 0]))


@case
def fact_a_excluded_patterns_are_known():
    return _both(_add(__exclude_patterns=["InPlacing"]), _add(__exclude_patterns=["InPlace"]))


@case
def fact_a_inplace_names_have_priorities():
    broken = _add(__inplace_op_names=["AddLhsInplace"])
    return _both(broken, _add(__inplace_op_names=["AddLhsInplace"], __inplace_op_priorities=[10.0]))


def _matmul(**attributes):
    return model([constant("w", np.ones((3, 3), np.float32)), node("MatMul", "x w", "y", **attributes)])


@case
def fact_a_available_memory_is_a_share():
    return _both(_matmul(__available_memory=1.5), _matmul(__available_memory=0.5))


@case
def fact_a_partials_are_half_or_float():
    return _both(_matmul(__partials_type="FLOAT16"), _matmul(__partials_type="HALF"))


@case
def fact_a_serialized_matmul_is_complete():
    mode = {"__serialize_matmul_mode": "output_channels", "__serialize_matmul_factor": 3}
    return _both(_matmul(**mode), _matmul(**mode, __serialize_matmul_precision=0))


def _all_reduce(**attributes):
    return model([node("ReplicatedAllReduce", "x", "y", GRAPHCORE, **attributes)])


@case
def fact_a_collective_operator_is_known():
    return _both(_all_reduce(__collectiveOperator=9), _all_reduce(__collectiveOperator=4))


@case
def fact_a_collective_group_is_one_of_two_forms():
    both = {"__collectiveCommGroup": [0, 0], "__collectiveReplicaGrouping": [1, 1, 1]}
    return _both(_all_reduce(**both), _all_reduce(__collectiveReplicaGrouping=[1, 1, 1]))


def _with_metadata(**metadata):
    made = _add()
    helper.set_model_props(made, {key.replace("_of_", "/"): text for key, text in metadata.items()})
    return made


@case
def fact_a_stream_metadata_is_a_small_number():
    key = "__replicated_stream_mode_of_x"
    return _both(_with_metadata(**{key: "Broadcast"}), _with_metadata(**{key: "0"}))


@case
def strict_stream_metadata_names_a_stream():
    key = "__exchange_strategy_of_"
    return _both(_with_metadata(**{f"{key}X": "0"}), _with_metadata(**{f"{key}x": "0"}))

"""Cases of standin/rules/pipeline.py."""

from __future__ import annotations

import dataclasses

import numpy as np
from popart_contract.cases import case
from popart_contract.protos import Given, model, node

PIPELINED = {"virtualGraphMode": "Manual", "enablePipelining": True}


def _two(first=(0, 0), second=(1, 1), second_inputs="h h", weights=(), **given):
    """Two ops with (IPU, stage) each; stage None is left out."""
    places = [{"__ipu_number": ipu} | ({} if stage is None else {"__pipeline_stage": stage}) for ipu, stage in (first, second)]
    nodes = [node("Add", "x x", "h", **places[0]), node("Add", second_inputs, "y", **places[1])]
    return Given(model(nodes, weights=weights), **{"options": PIPELINED, "device": ("Ipu", 2), "batches": 2} | given)


@case
def fact_d_ipu_model_has_no_replicas():
    made = model([node("Add", "x x", "y")])
    options = {"enableReplicatedGraphs": True, "replicatedGraphCount": 2}
    return Given(made, options, ("IpuModel", 2)), Given(made, options, ("Ipu", 2))


@case
def fact_d_pipelines_need_virtual_graphs():
    """One IPU to a replica makes one virtual graph."""
    replicated = PIPELINED | {"enableReplicatedGraphs": True, "replicatedGraphCount": 2}
    broken = _two(second=(0, 0), options=replicated)
    return broken, dataclasses.replace(broken, device=("Ipu", 4))


@case
def fact_d_all_ops_have_a_stage_or_none():
    return _two(second=(1, None)), _two(first=(0, None), second=(1, None))


@case
def fact_d_a_stage_is_on_one_virtual_graph():
    return _two(second=(1, 0)), _two()


@case
def fact_d_pipelines_are_filled():
    return _two(batches=1), _two()


@case
def fact_d_streams_and_variables_stay_on_one_ipu():
    return _two(second_inputs="h x"), _two(second_inputs="h w", weights={"w": np.ones(3, np.float32)})

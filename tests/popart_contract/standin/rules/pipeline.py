"""FACTS (d): replicas and pipelines."""

from __future__ import annotations

from popart_contract.standin.rules import model_rule


def _stages(model):
    """Stage and IPU of each op of the main graph, where pipelining is on and can be."""
    ops = [node for node in model.main.nodes if node.is_op]
    if not model.options.enablePipelining or not all("__ipu_number" in node.attributes for node in ops):
        return []
    places = [(node, node.attributes.get("__pipeline_stage"), node.attributes["__ipu_number"]) for node in ops]
    if all(stage is None for _, stage, _ in places):
        places = [(node, ipu, ipu) for node, _, ipu in places]
    return places


@model_rule
def fact_d_ipu_model_has_no_replicas(model):
    """Replication is not supported on the IPU model."""
    if model.device_type == "IpuModel" and model.replicas > 1:
        yield f"{model.replicas} replicas on the IPU model"


@model_rule
def fact_d_pipelines_need_virtual_graphs(model):
    """Pipelining needs virtual graphs, and more than one to a replica."""
    if model.options.enablePipelining:
        if model.options.virtualGraphMode.name == "Off":
            yield "enablePipelining with virtualGraphMode Off"
        elif model.ipus_per_replica < 2:
            yield "enablePipelining with one virtual graph to a replica"


@model_rule
def fact_d_all_ops_have_a_stage_or_none(model):
    """All ops of the main graph have `__pipeline_stage`, or none."""
    stages = [stage for _, stage, _ in _stages(model)]
    if None in stages and any(stage is not None for stage in stages):
        yield f"{stages.count(None)} of {len(stages)} ops have no __pipeline_stage"


@model_rule
def fact_d_a_stage_is_on_one_virtual_graph(model):
    """One virtual graph for each stage."""
    ipus = {}
    for _, stage, ipu in _stages(model):
        ipus.setdefault(stage, set()).add(ipu)
    for stage, numbers in ipus.items():
        if stage is not None and len(numbers) > 1:
            yield f"stage {stage} is on virtual graphs {sorted(numbers)}"


@model_rule
def fact_d_pipelines_are_filled(model):
    """batchesPerStep is at least the number of stages."""
    stages = {stage for _, stage, _ in _stages(model)}
    if len(stages) > model.data_flow.batchesPerStep():
        yield f"batchesPerStep is {model.data_flow.batchesPerStep()}, there are {len(stages)} stages"


@model_rule
def fact_d_streams_and_variables_stay_on_one_ipu(model):
    """In a pipeline a stream feeds one IPU, and a variable is not copied between IPUs."""
    users = {}
    for node, _, ipu in _stages(model):
        for name in node.proto.input:
            users.setdefault(name, set()).add(ipu)
    for name, ipus in users.items():
        is_variable = name in model.initializers and not model.options.constantWeights
        if len(ipus) > 1 and (name in model.streams or is_variable):
            yield f"{name} is used on IPUs {sorted(ipus)}"

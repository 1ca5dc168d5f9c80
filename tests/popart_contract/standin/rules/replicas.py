"""FACTS (b): weights that differ between groups of replicas."""

from __future__ import annotations

from popart_contract.standin.rules import model_rule

KEYS = ("__comm_group_type", "__comm_group_size", "__variable_settings")


@model_rule
def fact_b_replicas_need_the_option(model):
    """replicatedGraphCount > 1 with enableReplicatedGraphs False raises."""
    if model.options.replicatedGraphCount > 1 and not model.options.enableReplicatedGraphs:
        yield f"replicatedGraphCount is {model.options.replicatedGraphCount}, but enableReplicatedGraphs is False"


@model_rule
def fact_b_group_settings_are_enum_numbers(model):
    """Type 0 .. 3, size a decimal integer, retrieval mode 0 or 2: 1 is not supported."""
    for name in model.initializers:
        group = model.group(name)
        if group.kind not in (0, 1, 2, 3) or group.size is None or group.size < 0 or group.mode not in (0, 2):
            found = {key: model.metadata[f"{key}/{name}"] for key in KEYS if f"{key}/{name}" in model.metadata}
            yield f"{name}: {found} are no settings"


@model_rule
def fact_b_groups_have_a_size(model):
    """Size 0 with type Consecutive or Orthogonal raises."""
    for name in model.initializers:
        group = model.group(name)
        if group.kind in (1, 2) and group.size == 0:
            yield f"{name}: __comm_group_size 0 with __comm_group_type {group.kind}"


@model_rule
def strict_groups_divide_the_replicas(model):
    """R / size groups: a remainder would leave replicas without a value."""
    for name in model.initializers:
        group = model.group(name)
        if group.kind in (1, 2) and group.size and group.replicas % group.size:
            yield f"{name}: groups of {group.size} do not divide {group.replicas} replicas"


@model_rule
def fact_b_leading_dimension_is_the_group_count(model):
    """With G > 1 groups the initializer, and its graph input if listed, have shape [G, ...]."""
    listed = {entry.name: entry.type.tensor_type.shape for entry in model.proto.graph.input}
    for name, tensor in model.initializers.items():
        group = model.group(name)
        if not group.is_sound or group.count == 1:
            continue
        shapes = [list(tensor.dims)]
        if name in listed:
            shapes.append([dimension.dim_value for dimension in listed[name].dim])
        for shape in shapes:
            if not shape or shape[0] != group.count:
                yield f"{name}: shape {shape} does not begin with {group.count}, the number of groups"


@model_rule
def strict_variable_metadata_names_an_initializer(model):
    """PopART reads these by the initializer's name, so an entry for another name does nothing."""
    for key in model.metadata:
        field, _, name = key.partition("/")
        if field in KEYS and name not in model.initializers:
            yield f"metadata {key}: there is no such initializer"

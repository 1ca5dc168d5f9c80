"""FACTS (a): where nodes run, and the other annotations of nodes and inputs."""

from __future__ import annotations

from popart_contract.standin.facts import API
from popart_contract.standin.rules import model_rule

TYPES = {
    "__ipu_number": "INT", "__pipeline_stage": "INT", "__outline": "STRINGS", "__recompute_output_in_backward_pass": "INT",
    "__execution_phase": "INT", "__execution_context": "INT", "__schedule_priority": "FLOAT", "__tile_set": "INT",
    "__output_tensor_location": "INTS", "__exclude_patterns": "STRINGS", "__inplace_op_names": "STRINGS",
    "__inplace_op_priorities": "FLOATS", "__debug_info_id": "INT", "__available_memory": "FLOAT", "__partials_type": "STRING",
    "__output_type": "STRING", "__serialize_matmul_mode": "STRING", "__serialize_matmul_factor": "INT",
    "__serialize_matmul_precision": "INT", "__collectiveOperator": "INT", "__collectiveCommGroup": "INTS",
    "__collectiveReplicaGrouping": "INTS",
}  # fmt: skip
# metadata of a stream: key -> the most that it may be
STREAM_METADATA = {"__tile_set": 1, "__exchange_strategy": 3, "__replicated_stream_mode": 1}
SERIALIZE_MODES = ("none", "input_channels", "reducing_dim", "output_channels")


def _attributes(model, name):
    """(node, value) of the nodes that have an attribute, of the right type."""
    for node in model.nodes():
        if name in node.attributes and node.attribute_types[name] == TYPES[name]:
            yield node, node.attributes[name]


@model_rule
def fact_a_annotations_have_their_type(model):
    """An annotation that begins with two underscores is known, and is written with its AttributeProto type."""
    for node in model.nodes():
        for name, kind in node.attribute_types.items():
            if name.startswith("__") and TYPES.get(name) != kind:
                yield f"{node}: {name} is {kind}, wanted {TYPES.get(name, 'no such annotation')}"


@model_rule
def fact_a_all_ops_have_an_ipu_or_none(model):
    """With virtual graphs every op of every graph has `__ipu_number`, or none has."""
    if model.options.virtualGraphMode.name == "Off":
        return
    ops = [node for node in model.nodes() if node.is_op]
    without = [node for node in ops if "__ipu_number" not in node.attributes]
    if without and len(without) < len(ops):
        yield f"{len(without)} of {len(ops)} ops have no __ipu_number, the first is {without[0]}"


@model_rule
def fact_a_manual_mode_needs_annotations(model):
    """virtualGraphMode Manual without any `__ipu_number` raises."""
    has_any = any("__ipu_number" in node.attributes for node in model.nodes() if node.is_op)
    if model.options.virtualGraphMode.name == "Manual" and not has_any:
        yield "virtualGraphMode is Manual and no op has an __ipu_number"


@model_rule
def fact_a_ipu_numbers_are_in_range(model):
    """An index is in 0 .. IPUs / replicas - 1."""
    if model.options.virtualGraphMode.name != "Off":
        for node, number in _attributes(model, "__ipu_number"):
            if not 0 <= number < model.ipus_per_replica:
                yield f"{node}: __ipu_number {number}, a replica has {model.ipus_per_replica} IPUs"


@model_rule
def fact_a_replicas_share_the_ipus(model):
    """The IPU count is divisible by the replica count."""
    if model.num_ipus % max(model.replicas, 1):
        yield f"{model.num_ipus} IPUs do not divide into {model.replicas} replicas"


@model_rule
def fact_a_several_ipus_need_virtual_graphs(model):
    """virtualGraphMode Off with more than one IPU raises, unless there are as many replicas."""
    is_off = model.options.virtualGraphMode.name == "Off"
    if is_off and model.num_ipus > 1 and model.num_ipus != model.options.replicatedGraphCount:
        yield f"virtualGraphMode is Off, but there are {model.num_ipus} IPUs"


@model_rule
def fact_a_pipeline_stages_are_not_negative(model):
    """`__pipeline_stage` is at least 0."""
    for node, stage in _attributes(model, "__pipeline_stage"):
        if stage < 0:
            yield f"{node}: __pipeline_stage {stage}"


@model_rule
def fact_a_outline_is_pairs(model):
    """`__outline` is a flat list of keys and values."""
    for node, pairs in _attributes(model, "__outline"):
        if len(pairs) % 2:
            yield f"{node}: __outline has {len(pairs)} strings, wanted key, value, key, value, ..."


@model_rule
def fact_a_output_location_is_six_numbers(model):
    """`__output_tensor_location` is six ints."""
    for node, location in _attributes(model, "__output_tensor_location"):
        if len(location) != 6:
            yield f"{node}: __output_tensor_location has {len(location)} numbers, wanted 6"


@model_rule
def fact_a_excluded_patterns_are_known(model):
    """A pattern name that is none raises; the stand-in knows those that Patterns has as attributes."""
    for node, names in _attributes(model, "__exclude_patterns"):
        for name in set(names) - set(API["Patterns"]["attributes"]):
            yield f"{node}: no pattern {name!r}"


@model_rule
def fact_a_inplace_names_have_priorities(model):
    """`__inplace_op_names` and `__inplace_op_priorities`: both or neither, of the same length."""
    for node in model.nodes():
        names, priorities = (node.attributes.get(f"__inplace_op_{part}") for part in ("names", "priorities"))
        if (names is None) != (priorities is None) or (names is not None and len(names) != len(priorities)):
            yield f"{node}: __inplace_op_names {names} and __inplace_op_priorities {priorities} do not belong together"


@model_rule
def fact_a_available_memory_is_a_share(model):
    """`__available_memory` is in (0, 1]."""
    for node, share in _attributes(model, "__available_memory"):
        if not 0 < share <= 1:
            yield f"{node}: __available_memory {share} is not in (0, 1]"


@model_rule
def fact_a_partials_are_half_or_float(model):
    """`__partials_type` is half or float, in any letter case."""
    for node, name in _attributes(model, "__partials_type"):
        if name.lower() not in ("half", "float"):
            yield f"{node}: __partials_type {name!r}"


@model_rule
def fact_a_serialized_matmul_is_complete(model):
    """A mode is one of four, and brings factor and precision along."""
    for node, mode in _attributes(model, "__serialize_matmul_mode"):
        lacking = {"__serialize_matmul_factor", "__serialize_matmul_precision"} - set(node.attributes)
        if mode not in SERIALIZE_MODES:
            yield f"{node}: __serialize_matmul_mode {mode!r} is none of {SERIALIZE_MODES}"
        elif lacking:
            yield f"{node}: __serialize_matmul_mode without {sorted(lacking)}"


@model_rule
def fact_a_collective_operator_is_known(model):
    """`__collectiveOperator` is 0 .. 8."""
    for node, operator in _attributes(model, "__collectiveOperator"):
        if not 0 <= operator <= 8:
            yield f"{node}: __collectiveOperator {operator}"


@model_rule
def fact_a_collective_group_is_one_of_two_forms(model):
    """`__collectiveCommGroup` is two numbers, `__collectiveReplicaGrouping` three, and a node has one of them at most."""
    for node in model.nodes():
        group, grouping = (node.attributes.get(f"__collective{name}") for name in ("CommGroup", "ReplicaGrouping"))
        if group is not None and grouping is not None:
            yield f"{node}: __collectiveCommGroup and __collectiveReplicaGrouping together"
        if group is not None and len(group) != 2:
            yield f"{node}: __collectiveCommGroup {group}, wanted [type, size]"
        if grouping is not None and len(grouping) != 3:
            yield f"{node}: __collectiveReplicaGrouping {grouping}, wanted [replicas, stride, group size]"


@model_rule
def fact_a_stream_metadata_is_a_small_number(model):
    """Metadata of an input is a decimal integer of its enum."""
    for key, most in STREAM_METADATA.items():
        for name in model.streams:
            value = model.number(key, name, 0)
            if value is None or not 0 <= value <= most:
                yield f"{key}/{name} is {model.metadata[f'{key}/{name}']!r}, wanted 0 .. {most}"


@model_rule
def strict_stream_metadata_names_a_stream(model):
    """PopART reads these by the input's name, so an entry for another name does nothing."""
    for key in model.metadata:
        field, _, name = key.partition("/")
        if field in STREAM_METADATA and name not in model.streams:
            yield f"metadata {key}: there is no such graph input"

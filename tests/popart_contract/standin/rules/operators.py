"""FACTS (g, h): which operators there are, and what they take."""

from __future__ import annotations

from popart_contract.standin.facts import ABOUT_OPERATORS, operator, registered_version
from popart_contract.standin.rules import model_rule, node_rule


def _known(model):
    """(node, facts) of the nodes that PopART has an operator for."""
    for node in model.nodes():
        version = registered_version(node.domain, node.kind, model.opsets.get(node.domain, 0))
        if version is not None:
            yield node, operator(node.domain, node.kind, version)


@model_rule
def fact_g_custom_domains_are_listed(model):
    """A domain that is neither ai.onnx nor ai.graphcore must be in opset_import."""
    for node in model.nodes():
        if node.domain not in model.opsets:
            yield f"{node}: domain {node.domain} is not in opset_import"


@model_rule
def fact_h_operators_have_a_class(model):
    """An op without a creator raises."""
    for node in model.nodes():
        if node.domain not in model.opsets:
            continue  # a rule of its own
        is_known = registered_version(node.domain, node.kind, model.opsets[node.domain]) is not None
        if not is_known and node.kind not in ABOUT_OPERATORS["rewritten"]:
            yield f"{node}: No class for {node.domain}.{node.kind}"


@model_rule
def fact_h_operator_versions_are_accepted(model):
    """With strictOpVersions an op must have the version that the ONNX opset gives it."""
    accepted = ABOUT_OPERATORS["accepted"].get(str(model.opsets["ai.onnx"]))
    free = {"Constant", "Shape", "ConstantOfShape", *ABOUT_OPERATORS["rewritten"]}
    for node, _ in _known(model) if model.options.strictOpVersions and accepted else ():
        if node.domain == "ai.onnx" and node.kind not in accepted and node.kind not in free:
            yield f"{node}: {node.kind} is not accepted at opset {model.opsets['ai.onnx']}"


@model_rule
def strict_attributes_are_known(model):
    """An attribute that an operator does not have is not read, so it cannot mean what it was written for."""
    for node, known in _known(model):
        unknown = sorted(name for name in node.attributes if not name.startswith("__") and name not in known["attributes"])
        if unknown:
            yield f"{node}: {node.kind} has no attributes {unknown}; it has {sorted(known['attributes'])}"


@model_rule
def fact_h_attributes_have_their_type(model):
    """The creator reads an attribute as one AttributeProto type."""
    for node, known in _known(model):
        for name, kind in node.attribute_types.items():
            wanted = known["attributes"].get(name, {}).get("type")
            if wanted and kind != wanted and not name.startswith("__"):
                yield f"{node}: {name} is {kind}, wanted {wanted}"


@model_rule
def fact_h_required_attributes_are_there(model):
    """An attribute getter without a default raises when the attribute is absent."""
    for node, known in _known(model):
        required = {name for name, attribute in known["attributes"].items() if attribute.get("required")}
        if node.kind == "Constant":
            required = {"value"}
        lacking = sorted(required - set(node.attributes))
        if lacking:
            yield f"{node}: {node.kind} needs {lacking}"


@model_rule
def fact_h_input_and_output_counts_fit(model):
    """The definition's counts: the Builder checks them, a proto that breaks them fails later."""
    for node, known in _known(model):
        given, made = len(node.proto.input), len(node.proto.output)
        least, most = known["inputs"] or (0, -1)
        if given < least or (most >= 0 and given > most):
            yield f"{node}: {given} inputs, wanted {least} .. {most if most >= 0 else 'any number'}"
        if known["outputs"] is not None and 0 <= known["outputs"] < made:
            yield f"{node}: {made} outputs, wanted at most {known['outputs']}"


@node_rule
def fact_i_input_types_are_declared(node):
    """The definition's types are not checked when a model is loaded, but another type may fail in lowering."""
    for place, given in enumerate(node.inputs):
        allowed = node.known["dtypes"]
        names = allowed[min(place, len(allowed) - 1)] if allowed else ()
        if given is not None and names and names != ["supportedTypes"] and given.dtype not in names:
            yield f"input {place} is {given}, {node.kind} takes {', '.join(names)}"

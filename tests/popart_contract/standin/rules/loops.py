"""FACTS (c): Loop, Call, and what is the same for every graph."""

from __future__ import annotations

from popart_contract.standin.rules import model_rule, node_rule


def _loops(model):
    return [(node, node.bodies[0].proto) for node in model.nodes() if node.kind == "Loop" and node.bodies]


@model_rule
def fact_c_an_anchor_is_needed(model):
    """An inference session without an anchor raises."""
    if not model.data_flow.nAnchors():
        yield "DataFlow has no anchor"


@model_rule
def fact_c_anchors_exist(model):
    """An anchor is a tensor of the main graph. An initializer that no node takes is not created: FACTS (b)."""
    made = {name for node in model.main.proto.node for name in node.output} | set(model.streams)
    made |= set(model.initializers) & model.used
    for name in model.data_flow.anchors():
        if name not in made:
            yield f"anchor {name!r} is no tensor"


@model_rule
def fact_c_loop_gets_trip_count_and_condition(model):
    """Both are given: an empty name is looked up like any other."""
    for node, _ in _loops(model):
        given = list(node.proto.input[:2])
        if len(given) < 2 or not all(given):
            yield f"{node}: trip count and condition are {given}"


@model_rule
def fact_c_each_loop_input_has_a_body_input(model):
    """Inputs and body inputs go together by position."""
    for node, body in _loops(model):
        if len(body.input) != len(node.proto.input):
            yield f"{node}: {len(node.proto.input)} inputs, the body has {len(body.input)}"


@model_rule
def fact_c_loop_outputs_follow_the_body(model):
    """The body gives the condition, each carried value, then scan outputs; the node gives all but the condition."""
    for node, body in _loops(model):
        carried = len(node.proto.input) - 2
        if len(body.output) < carried + 1 or len(node.proto.output) != len(body.output) - 1:
            found = f"{len(body.output)} body outputs, {len(node.proto.output)} outputs"
            yield f"{node}: {carried} carried values, {found}; wanted 1 + carried + scans, and one less"


@model_rule
def fact_c_nodes_are_in_order(model):
    """Every graph is in topological order, and every name is made before it is used; bodies see what is around them."""

    def names_of(graph):
        # What a body sees of the graph around it is what was there before the node that it belongs to.
        seen = {entry.name for entry in (*graph.proto.input, *graph.proto.initializer)}
        if graph.owner and graph.owner.kind != "Call":
            seen |= names_before[graph.owner]
        return seen

    names_before = {}
    for graph in model.graphs():
        seen = names_of(graph)
        for node in graph.nodes:
            names_before[node] = set(seen)
            unknown = [name for name in node.proto.input if name and name not in seen]
            if unknown:
                yield f"{node}: {unknown} are not there yet"
            seen |= set(node.proto.output)
        unknown = [entry.name for entry in graph.proto.output if entry.name not in seen]
        if unknown:
            yield f"outputs {unknown} of {graph.path or 'the main graph'} are not made anywhere"


@model_rule
def fact_c_bodies_have_no_initializers(model):
    """Only those of the main graph are registered."""
    for graph in model.graphs():
        if graph.is_body and graph.proto.initializer:
            yield f"{graph.path}: initializers {[tensor.name for tensor in graph.proto.initializer]} are not registered"


@model_rule
def fact_c_bodies_have_no_empty_inputs(model):
    """An empty optional input on a body node is taken for a tensor of the graph around it."""
    for graph in model.graphs():
        for node in graph.nodes if graph.is_body else ():
            if "" in node.proto.input and node.kind != "Loop":
                yield f"{node}: an empty input"


@model_rule
def fact_c_bodies_have_no_shape_nodes(model):
    """Shape and ConstantOfShape are folded under names that ignore the body."""
    for graph in model.graphs():
        for node in graph.nodes if graph.is_body else ():
            if node.kind in ("Shape", "ConstantOfShape"):
                yield f"{node}: {node.kind} in a body"


@model_rule
def fact_c_a_called_graph_is_named_once(model):
    """Call reuses the first graph of a name, whatever the second holds; a graph without a name raises."""
    first = {}
    for node in model.nodes():
        for body in node.bodies if node.kind == "Call" else ():
            name = body.proto.name
            if not name:
                yield f"{node}: the called graph has no name"
            elif first.setdefault(name, body.proto.SerializeToString()) != body.proto.SerializeToString():
                yield f"{node}: another graph is called {name!r} already, and would be taken in place of this one"


@model_rule
def fact_c_names_are_made_once(model):
    """A tensor id belongs to one tensor of its graph."""
    for graph in model.graphs():
        made = {entry.name for entry in (*graph.proto.input, *graph.proto.initializer)}
        for node in graph.nodes:
            for name in filter(None, node.proto.output):
                if name in made:
                    yield f"{node}: {name!r} is there already"
                made.add(name)


@node_rule
def fact_c_trip_count_is_a_known_integer(node):
    """M is a constant or an initializer of INT32, UINT32, INT64 or UINT64: one number."""
    if node.kind == "Loop":
        trip = node.inputs[0]
        if trip.array is None or trip.array.size != 1 or trip.dtype not in ("INT32", "UINT32", "INT64", "UINT64"):
            yield f"the trip count {trip} must be one constant integer"


@node_rule
def fact_c_loop_condition_is_bool(node):
    """The condition is BOOL."""
    if node.kind == "Loop" and node.inputs[1].dtype != "BOOL":
        yield f"the condition is {node.inputs[1]}"


@node_rule
def fact_c_carried_values_keep_their_shape(node):
    """What the body returns has shape and type of what it was given, and its condition is BOOL."""
    if node.kind == "Loop" and node.body_results:
        if node.body_results[0].dtype != "BOOL":
            yield f"the body's condition is {node.body_results[0]}"
        for place, (before, after) in enumerate(zip(node.inputs[2:], node.body_results[1:], strict=False)):
            if (before.dtype, before.shape) != (after.dtype, after.shape):
                yield f"carried value {place} is {before}, the body returns {after}"

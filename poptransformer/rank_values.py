"""Which values of a graph differ between tensor-parallel ranks."""

from __future__ import annotations

from poptransformer.errors import UserError
from poptransformer.graph import Graph, Value

_EQUALISING = ("all_reduce", "all_gather")


def rank_values(graph: Graph) -> set[Value]:
    """Values that each rank has its own of: cut weights and states, the rank's index, and what is computed from them before
    the ranks' parts are brought together.

    Raises: UserError if an output, or the update of a state that all ranks share, is among them.
    """
    differing = {value for parameter, value in graph.parameters.values() if parameter.cut is not None}
    differing |= {value for state, value in graph.states.values() if state.is_cut}
    _spread(graph, differing)
    wrong = [f"output {name!r}" for name, value in graph.outputs.items() if value in differing]
    wrong += [
        f"state {name!r}"
        for name, value in graph.state_updates.items()
        if value in differing and not graph.states[name][0].is_cut
    ]
    if wrong:
        raise UserError(
            f"graph {graph.name!r}: {', '.join(wrong)} would differ between ranks; an all_reduce or all_gather is missing, or "
            "the state is not marked is_cut"
        )
    return differing


def _spread(graph, differing):
    for node in graph.nodes:
        if node.op == "loop":
            _spread_through_loop(node, differing)
        elif node.op == "rank_index" or node.op not in _EQUALISING and any(value in differing for value in node.inputs):
            differing.update(node.outputs)


def _spread_through_loop(node, differing):
    """A carried value differs if it does before the first step or after any."""
    body = node.attributes["body"]
    carried = [value for name, value in body.inputs.items() if name != "step"]
    before = node.inputs[1:]
    after = list(body.outputs.values())[1:]
    differing.update(inner for outer, inner in zip(before, carried, strict=True) if outer in differing)
    while True:
        _spread(body, differing)
        late = [inner for inner, value in zip(carried, after, strict=True) if value in differing and inner not in differing]
        if not late:
            break
        differing.update(late)
    differing.update(value for value, inner in zip(node.outputs, carried, strict=True) if inner in differing)

"""StagedProgram: a graph whose stages are on several device groups.

The nodes between two loops make one piece for each stage, each a program of its own; as stages never go back along the graph,
the pieces run in the order of their stages. Values that a later piece needs are moved to its devices. Loops run on the host:
each step runs the pieces of the body, and waits for the condition.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from poptransformer.backends.xla.program import emit_nodes, evaluate, uninterrupted
from poptransformer.graph import Graph, Node, Value
from poptransformer.rank_values import rank_values

SMALL_BYTES = 1 << 16  # values below it are not worth donating


@dataclasses.dataclass
class Piece:
    """Nodes of one stage that run as one program."""

    stage: int
    nodes: list[Node]
    donated: list[Value] = dataclasses.field(default_factory=list)  # arguments that nobody needs afterwards
    kept: list[Value] = dataclasses.field(default_factory=list)
    results: list[Value] = dataclasses.field(default_factory=list)
    program: object = None


@dataclasses.dataclass
class HostLoop:
    """A loop node and the parts of its body."""

    node: Node
    parts: list

    @property
    def body(self) -> Graph:
        return self.node.attributes["body"]

    @property
    def carried(self) -> list[Value]:
        """The body's inputs but the step, in the order of the values that the loop carries."""
        return [value for name, value in self.body.inputs.items() if name != "step"]


class StagedProgram:
    """See the module's docstring; called as Program is."""

    def __init__(self, graph, groups, context):
        self.graph, self._groups, self._context = graph, groups, context
        self._differing = rank_values(graph) if groups[0].world_size > 1 else set()
        self._states = {value for _, value in graph.states.values()}
        self._parts = self._split(graph, [*graph.outputs.values(), *graph.state_updates.values()])
        self._steps = {}

    # ---- compile

    def _split(self, graph, wanted):
        """Pieces and loops of a graph or a loop's body, compiled; `wanted` are the values that are needed at the end."""
        parts, run = [], []
        for node in (*graph.nodes, None):
            if node is not None and node.op != "loop":
                run.append(node)
                continue
            stages = sorted({node.stage for node in run})
            parts += [Piece(stage, [node for node in run if node.stage == stage]) for stage in stages]
            run = []
            if node is not None:
                body = node.attributes["body"]
                parts.append(HostLoop(node, self._split(body, list(body.outputs.values()))))
        for place, part in enumerate(parts):
            if isinstance(part, Piece):
                others = [_used(other) for other in (*parts[:place], *parts[place + 1 :])]
                self._compile(part, graph, others, set(wanted))
        return parts

    def _compile(self, piece, graph, used_elsewhere, wanted):
        root = graph.root
        elsewhere = set().union(*used_elsewhere) if used_elsewhere else set()
        made = [value for node in piece.nodes for value in node.outputs]
        piece.results = [value for value in made if value in elsewhere or value in wanted]
        arguments = [value for value in _used(piece) if value not in set(made) and value not in root.constants]
        for value in arguments:
            is_last_use = self._is_replaced(value, graph) and value not in elsewhere and value not in wanted
            (piece.donated if is_last_use and value.spec.num_bytes > SMALL_BYTES else piece.kept).append(value)

        def program(donated, kept):
            values = {value: jnp.asarray(array) for value, array in root.constants.items()}
            values |= dict(zip((*piece.donated, *piece.kept), (*donated, *kept), strict=True))
            self._context.evaluate = functools.partial(evaluate, self._context, values)
            emit_nodes(self._context, values, piece.nodes)
            return [values[value] for value in piece.results]

        group = self._groups[piece.stage]
        trees = (piece.donated, piece.kept), piece.results
        are_cut = [jax.tree.map(lambda value: value in self._differing, tree) for tree in trees]
        jitted = jax.jit(group.on_ranks(program, *are_cut), donate_argnums=0, keep_unused=True)
        abstract = jax.tree.map(lambda value: group.abstract(value.spec, value in self._differing), trees[0])
        piece.program = uninterrupted(jitted.lower(*abstract).compile)

    def _is_replaced(self, value, graph):
        """Whether a value is a state that the graph updates, or what a loop carries: another one takes its place."""
        if value in self._states:
            return graph.parent is None and any(
                state_value is value and name in graph.state_updates for name, (_, state_value) in graph.states.items()
            )
        return graph.parent is not None and value in graph.inputs.values()

    # ---- run

    def __call__(self, parameters, states, inputs):
        """See Program."""
        graph = self.graph
        values = {value: dict(parameters[key]) for key, (_, value) in graph.parameters.items()}
        values |= {value: {_home(states[key], self._groups): states[key]} for key, (_, value) in graph.states.items()}
        values |= {value: {None: np.asarray(inputs[key])} for key, value in graph.inputs.items()}
        values |= {value: {None: array} for value, array in graph.constants.items()}
        self._run_parts(self._parts, values)
        outputs = {key: _any(values[value]) for key, value in graph.outputs.items()}
        return outputs, {key: _any(values[value]) for key, value in graph.state_updates.items()}

    def _run_parts(self, parts, values):
        for part in parts:
            if isinstance(part, HostLoop):
                self._run_loop(part, values)
                continue
            arguments = ([self._at(values, value, part.stage) for value in kind] for kind in (part.donated, part.kept))
            for value, array in zip(part.results, part.program(*arguments), strict=True):
                values[value] = {part.stage: array}

    def _run_loop(self, loop, values):
        keep_going, *carried = [values[value] for value in loop.node.inputs]
        donated = {value for part in loop.parts if isinstance(part, Piece) for value in part.donated}
        carried = [
            places if value not in donated or outer in self._states else _copy(places)
            for outer, value, places in zip(loop.node.inputs[1:], loop.carried, carried, strict=True)
        ]
        for step in range(loop.node.attributes["max_steps"]):
            if not np.asarray(_any(keep_going)):
                break
            values.update(zip(loop.carried, carried, strict=True))
            if "step" in loop.body.inputs:
                values[loop.body.inputs["step"]] = self._steps.setdefault(step, {None: np.int32(step)})
            self._run_parts(loop.parts, values)
            keep_going, *carried = [values[value] for value in loop.body.outputs.values()]
        values.update(zip(loop.node.outputs, carried, strict=True))

    def _at(self, values, value, stage):
        """A value's array on a stage's devices; moved there, and kept for the next who asks, if it lies elsewhere."""
        places = values[value]
        if stage not in places:
            assert value not in self._differing, f"{value} would have to move to stage {stage} rank by rank"
            places[stage] = self._groups[stage].put(_any(places))
        return places[stage]


def _used(part) -> dict[Value, None]:
    """Values that a part takes from outside or makes itself and uses, in order; loops: with those of their bodies."""
    if isinstance(part, HostLoop):
        used = dict.fromkeys(value for value in part.node.inputs)
        used |= dict.fromkeys(part.body.outputs.values())
        for inner in part.parts:
            used |= _used(inner)
        return used
    return dict.fromkeys(value for node in part.nodes for value in node.inputs if value is not None)


def _any(places):
    return next(iter(places.values()))


def _copy(places):
    stage, array = next(iter(places.items()))
    return {stage: jnp.copy(array) if isinstance(array, jax.Array) else array}


def _home(array, groups):
    """The stage whose devices an array lies on."""
    devices = array.sharding.device_set
    return next(stage for stage, group in enumerate(groups) if devices == set(group.devices))

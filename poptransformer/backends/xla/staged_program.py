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

from poptransformer.backends.xla.compiler_options import compiler_options
from poptransformer.backends.xla.program import emit_nodes, evaluate, uninterrupted
from poptransformer.errors import UserError
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
    """A loop node and the parts of its body.

    Attributes:
      may_overwrite: for each carried value whether the first step may overwrite what the loop is given.
    """

    node: Node
    parts: list
    may_overwrite: list[bool] = dataclasses.field(default_factory=list)

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
        own = self._own_values(graph, parts)
        for place, part in enumerate(parts):
            needed = set(wanted).union(*(_used(other) for other in (*parts[:place], *parts[place + 1 :])))
            if isinstance(part, Piece):
                self._compile(part, graph, own - needed, needed)
            else:
                given = part.node.inputs[1:]
                needed |= set(_used_inside(part))
                part.may_overwrite = [value in own - needed and given.count(value) == 1 for value in given]
        return parts

    def _own_values(self, graph, parts):
        """Values from before the graph that it may overwrite once it needs them no more: another one takes their place, and
        nobody else holds their arrays.

        They are states that the graph updates, and what a body is given by the step before, if a node of the body has made it.
        """
        if graph.parent is None:
            return {value for name, (_, value) in graph.states.items() if name in graph.state_updates}
        made = {value for part in parts if isinstance(part, Piece) for node in part.nodes for value in node.outputs}
        carried = [value for name, value in graph.inputs.items() if name != "step"]
        given = list(graph.outputs.values())[1:]
        return {value for value, after in zip(carried, given, strict=True) if after in made and given.count(after) == 1}

    def _compile(self, piece, graph, own, needed):
        """Compile a piece; `own` are values that it may overwrite, `needed` those that others take from it."""
        root = graph.root
        made = [value for node in piece.nodes for value in node.outputs]
        piece.results = [value for value in made if value in needed]
        arguments = [value for value in _used(piece) if value not in set(made) and value not in root.constants]
        for value in arguments:
            (piece.donated if value in own and value.spec.num_bytes > SMALL_BYTES else piece.kept).append(value)

        def program(donated, kept):
            values = {value: jnp.asarray(array) for value, array in root.constants.items()}
            given = zip((*piece.donated, *piece.kept), (*donated, *kept), strict=True)
            values |= {
                value: array if value.shape else jnp.reshape(array, ())  # scalars that differ have an axis
                for value, array in given
            }
            self._context.evaluate = functools.partial(evaluate, self._context, values)
            emit_nodes(self._context, values, piece.nodes)
            return [jnp.reshape(values[value], self._shape(value)) for value in piece.results]

        group = self._groups[piece.stage]
        trees = (piece.donated, piece.kept), piece.results
        are_cut = [jax.tree.map(lambda value: value in self._differing, tree) for tree in trees]
        jitted = jax.jit(group.on_ranks(program, *are_cut), donate_argnums=0, keep_unused=True)
        abstract = jax.tree.map(lambda value: group.abstract_of(value, value in self._differing, self._context.specs), trees[0])
        lowered = jitted.lower(*abstract)
        piece.program = uninterrupted(lambda: lowered.compile(compiler_options(self._context.platform)))

    def _shape(self, value):
        """Of a value between two pieces: a scalar that differs between ranks has an axis to be joined along."""
        return (1,) if value.shape == () and value in self._differing else value.shape

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
        shared = [array for places in parameters.values() for array in places.values()]
        shared += [array for key, array in states.items() if key not in graph.state_updates]
        shared = {id(array) for array in shared}
        updates = {}
        for key, value in graph.state_updates.items():
            # A state has its array for itself, as the next run overwrites it.
            stage, array = next(iter(values[value].items()))
            array = self._groups[value.stage].put(array) if stage is None else array
            updates[key] = jnp.copy(array) if stage is None or id(array) in shared else array
            shared.add(id(updates[key]))
        return outputs, updates

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
        overwritten = {value for part in loop.parts if isinstance(part, Piece) for value in part.donated}
        overwritten |= {
            value
            for part in loop.parts
            if isinstance(part, HostLoop)
            for value, may in zip(part.node.inputs[1:], part.may_overwrite, strict=True)
            if may
        }
        carried = [
            places if may or value not in overwritten else self._copy(places)
            for value, places, may in zip(loop.carried, carried, loop.may_overwrite, strict=True)
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

    def _copy(self, places):
        """The same value in an array of its own, on one stage."""
        stage, array = next(iter(places.items()))
        return {stage or 0: jnp.copy(array if stage is not None else self._groups[0].put(array))}

    def _at(self, values, value, stage):
        """A value's array on a stage's devices; moved there, and kept for the next who asks, if it lies elsewhere."""
        places = values[value]
        if stage not in places:
            if value in self._differing:
                home = next(iter(places))
                raise UserError(
                    f"graph {self.graph.name!r}: {value.name} differs between ranks and lies on stage {home}, but stage "
                    f"{stage} uses it; an all_reduce or all_gather is missing"
                )
            places[stage] = self._groups[stage].put(_any(places))
        return places[stage]


def _used(part) -> dict[Value, None]:
    """Values that a part takes from outside or makes itself and uses, in order; loops: with those of their bodies."""
    if isinstance(part, HostLoop):
        return dict.fromkeys(part.node.inputs) | _used_inside(part)
    return dict.fromkeys(value for node in part.nodes for value in node.inputs if value is not None)


def _used_inside(loop) -> dict[Value, None]:
    """Values that a loop's body uses or gives."""
    used = dict.fromkeys(loop.body.outputs.values())
    for part in loop.parts:
        used |= _used(part)
    return used


def _any(places):
    return next(iter(places.values()))


def _home(array, groups):
    """The stage whose devices an array lies on."""
    devices = array.sharding.device_set
    return next(stage for stage, group in enumerate(groups) if devices == set(group.devices))

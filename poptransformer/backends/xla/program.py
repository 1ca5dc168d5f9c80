"""Programs: a graph, compiled for the device group that runs it, or for several groups one after the other.

Both kinds are called alike: `program(parameters, states, inputs) -> (outputs, updated states)`, with parameters as name ->
{stage: array} and states by name.
"""

from __future__ import annotations

import concurrent.futures
import functools
import threading

import jax
import jax.numpy as jnp

from poptransformer.backends.xla.lowering import LOWERINGS
from poptransformer.rank_values import rank_values


class Program:
    """A graph whose nodes all run on one device group: one XLA program, loops on the device."""

    def __init__(self, graph, group, context):
        """Trace and compile ahead of the first run: XLA then knows every shape and which buffers it may overwrite."""
        self.graph, self._group = graph, group
        differing = rank_values(graph) if group.world_size > 1 else set()
        updated, kept = _split_states(graph)

        def program(parameters, updated, kept, inputs):
            values = {value: jnp.asarray(array) for value, array in graph.constants.items()}
            values |= {value: parameters[key] for key, (_, value) in graph.parameters.items()}
            values |= {value: (updated | kept)[key] for key, (_, value) in graph.states.items()}
            context.evaluate = functools.partial(evaluate, context, values)
            outputs = dict(zip(graph.outputs, context.evaluate(graph, inputs), strict=True))
            return outputs, {key: values[value] for key, value in graph.state_updates.items()}

        arguments = (
            {key: value for key, (_, value) in graph.parameters.items()},
            {key: graph.states[key][1] for key in updated},
            {key: graph.states[key][1] for key in kept},
            dict(graph.inputs),
        )
        results = dict(graph.outputs), dict(graph.state_updates)
        are_cut = [jax.tree.map(lambda value: value in differing, tree) for tree in (arguments, results)]
        jitted = jax.jit(group.on_ranks(program, *are_cut), donate_argnums=1, keep_unused=True)
        abstract = jax.tree.map(lambda value: group.abstract(value.spec, value in differing), arguments)
        self._program = uninterrupted(jitted.lower(*abstract).compile)

    def __call__(self, parameters, states, inputs):
        """See the module's docstring; the states that the graph updates are overwritten."""
        graph = self.graph
        updated, kept = _split_states(graph)
        return self._program(
            {key: parameters[key][0] for key in graph.parameters},
            {key: states[key] for key in updated},
            {key: states[key] for key in kept},
            {key: self._group.put(array) for key, array in inputs.items()},
        )

    def as_text(self) -> str:
        """The compiled program in XLA's language."""
        return self._program.as_text()


def _split_states(graph):
    return (
        [key for key in graph.states if key in graph.state_updates],
        [key for key in graph.states if key not in graph.state_updates],
    )


def evaluate(context, values, graph, inputs):
    """Emit a graph's nodes into the program that is being traced; `values` has what the graphs around it computed."""
    for key, value in graph.inputs.items():
        values[value] = inputs[key]
    emit_nodes(context, values, graph.nodes)
    return [values[value] for value in graph.outputs.values()]


def emit_nodes(context, values, nodes):
    """Emit nodes into the program that is being traced, and put their results into `values`."""
    for node in nodes:
        arrays = [None if value is None else values[value] for value in node.inputs]
        with jax.named_scope(node.scope or node.op), context.lowering(node):
            results = LOWERINGS[node.op](context, *arrays, **node.attributes)
        results = results if isinstance(results, (tuple, list)) else (results,)
        for value, array in zip(node.outputs, results, strict=True):
            assert array.shape == value.shape and array.dtype == value.dtype, (
                f"{node.scope}: {node.op} gave {array.dtype}{array.shape}, not {value.spec}"
            )
            values[value] = array


def uninterrupted(function):
    """Call a function in a thread of its own and wait for it.

    An interrupt then comes at once, here, and the interpreter waits for the thread before it ends: were XLA's compiler
    interrupted itself, it would go on while the process is taken down around it, and crash (seen with jaxlib 0.10).
    """
    future = concurrent.futures.Future()

    def call():
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, name="compile", daemon=False).start()
    return future.result()

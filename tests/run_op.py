"""Running ops by themselves: a graph of a few nodes, compiled and run on one engine."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from poptransformer.backends.reference.engine import ReferenceEngine
from poptransformer.errors import UserError
from poptransformer.graph import Graph, bfloat16

FLOATS = {"float32": np.dtype(np.float32), "bfloat16": bfloat16, "float16": np.dtype(np.float16)}
SIZES = (1, 3, 17, 127, 128, 129)  # those that break kernels: one, odd primes, around a power of two


def reference(float_dtype=None, world_size=1):
    """An engine of the NumPy backend."""
    return ReferenceEngine(float_dtype, world_size)


def xla(custom_ops=False, world_size=1, num_stages=1):
    """An engine of the XLA backend on the CPU, without a compile cache; skips where the kernels asked for are not built."""
    from poptransformer.backends.xla.engine import XlaEngine

    try:
        return XlaEngine("cpu", custom_ops, "", world_size, num_stages)
    except UserError as error:
        if custom_ops and "not found" in str(error):
            pytest.skip(f"{error}")
        raise


def build_graph(build, **arrays):
    """A graph whose inputs are like the arrays and whose outputs are what `build(**values)` returns.

    `build` returns a Value, or a list, tuple or dict of them.
    """
    graph = Graph("test")
    results = build(**{name: graph.input(name, np.shape(array), np.asarray(array).dtype) for name, array in arrays.items()})
    if not isinstance(results, dict):
        results = dict(enumerate(results)) if isinstance(results, (list, tuple)) else {"result": results}
    for name, value in results.items():
        graph.output(str(name), value)
    return graph


def run_op(engine, build, **arrays):
    """Build a graph, compile it on the engine and run it on the arrays.

    Args:
      build: as for build_graph.
      arrays: the inputs by name.
    Returns: NumPy arrays in the form that `build` returns: one, a list or a dict.
    """
    name = f"test_{len(engine.graphs)}"
    kind = []

    def noting(**values):
        results = build(**values)
        kind.append(type(results))
        return results

    engine.compile(name, build_graph(noting, **arrays))
    outputs = engine.run(name, {key: np.asarray(array) for key, array in arrays.items()})
    if kind[0] is dict:
        return outputs
    return list(outputs.values()) if kind[0] in (list, tuple) else outputs["result"]


def compiled(engine, build, **like):
    """Compile once for inputs like the given arrays; returns a function of arrays that runs it again and again."""
    name = f"test_{len(engine.graphs)}"
    engine.compile(name, build_graph(build, **like))

    def run(**arrays):
        outputs = engine.run(name, {key: np.asarray(array) for key, array in arrays.items()})
        return outputs["result"] if list(outputs) == ["result"] else outputs

    return run


def normal(shape, dtype=np.float32, seed=0, scale=1.0):
    """Normally distributed numbers, the same for the same arguments."""
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(dtype)


@functools.cache
def hypothesis_settings(max_examples):
    """Few examples, always the same ones: compiling takes the time."""
    from hypothesis import settings

    return settings(max_examples=max_examples, deadline=None, derandomize=True, database=None)


def refusal(build, *specs):
    """The message with which an op refuses inputs of the given (shape, dtype) specs; it must begin with the layer's name."""
    graph = Graph("test")
    values = [graph.input(f"x{i}", shape, dtype) for i, (shape, dtype) in enumerate(specs)]
    with graph.scope("model.layers.7"), pytest.raises(UserError) as caught:
        build(*values)
    message = str(caught.value)
    assert message.startswith("model.layers.7: "), message
    assert not graph.nodes, "a refused op must leave no node behind"
    return message.removeprefix("model.layers.7: ")

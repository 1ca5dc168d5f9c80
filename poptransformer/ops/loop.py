"""loop: repeat a body on the device, carrying values from step to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from poptransformer.errors import UserError
from poptransformer.graph import Graph, Spec, Value
from poptransformer.ops.op import define, emit, require


def _infer(keep_going, *carried, max_steps, body):
    require(keep_going.shape == () and keep_going.dtype == bool, "the first condition must be a bool scalar")
    require(max_steps >= 1, "max_steps must be at least 1")
    results = list(body.outputs.values())
    wanted = f"the body must return a condition and {len(carried)} carried values"
    require(len(results) == len(carried) + 1, f"{wanted}, not {len(results)} values")
    require(results[0].spec == Spec((), bool), f"the body's condition must be a bool scalar, not {results[0].spec}")
    for number, (before, after) in enumerate(zip(carried, results[1:], strict=True)):
        require(before == after.spec, f"carried value {number} is {before}, the body returns {after.spec}")
    return list(carried)


def _reference(*arrays, **attributes):
    raise AssertionError("a loop's body is a graph; the reference backend's engine walks it")


define("loop", _infer, _reference)


def loop(max_steps: int, keep_going: Value, carried: Sequence[Value], body: Callable) -> tuple[Value, ...]:
    """Run `body` until it says stop or has run `max_steps` times.

    The body is traced once into a sub-graph; it may use values from outside, which do not change.

    Args:
      max_steps: the most steps, fixed when the graph is built.
      keep_going: bool scalar; False runs no step at all.
      carried: values given to the first step.
      body: (step, *carried) -> (keep_going, *carried): step is an int32 scalar counted from 0, the results have the
        shapes and dtypes of the carried values.
    Returns: the carried values after the last step.
    """
    outer = max((value.graph for value in (keep_going, *carried)), key=lambda graph: graph.depth)
    inner = Graph(f"{outer.name}/body", parent=outer)
    step = inner.input("step", (), np.int32)
    inputs = [inner.input(f"carried_{i}", value.shape, value.dtype) for i, value in enumerate(carried)]
    results = list(body(step, *inputs))
    if not all(isinstance(value, Value) for value in results):
        raise UserError(f"{outer.where('loop')}: the body must return Values: the condition, then the carried values")
    for i, value in enumerate(results):
        inner.output("keep_going" if i == 0 else f"carried_{i - 1}", value)
    return emit("loop", keep_going, *carried, max_steps=int(max_steps), body=inner)

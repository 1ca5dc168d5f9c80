"""The table of XLA lowerings: op name -> function that emits jnp, lax or FFI calls while a graph is traced.

A lowering is called as `lower(context, *arrays, **attributes)` and returns one array or a tuple of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from poptransformer.graph import Value

LOWERINGS: dict[str, Callable] = {}


@dataclasses.dataclass
class Context:
    """What a lowering may ask about the engine that traces it.

    Attributes:
      platform: JAX's name of it, "cpu", "gpu" or "tpu".
      custom_ops: names of the ops that run as kernels of this project.
      specs: how parameters lie on the devices that lie there otherwise than the graph says, as pytrees of Specs.
      evaluate: (graph, inputs) -> list of outputs; traces a loop's body.
    """

    platform: str
    custom_ops: frozenset[str]
    specs: dict[Value, object] = dataclasses.field(default_factory=dict)
    evaluate: Callable | None = None


def product(x, y, dimensions):
    """dot_general with float32 sums; float32 operands are not rounded on the way, as GPUs (TF32) and TPUs do by default."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=jnp.float32)


def lowering(name: str):
    """Decorator that enters a function into the table under an op's name."""

    def enter(function):
        assert name not in LOWERINGS, f"op {name!r} has two XLA lowerings"
        LOWERINGS[name] = function
        return function

    return enter

"""The table of XLA lowerings: op name -> function that emits jnp, lax or FFI calls while a graph is traced.

A lowering is called as `lower(context, *arrays, **attributes)` and returns one array or a tuple of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from poptransformer.backends.engine import Choice
from poptransformer.backends.xla.fuse import STEP_PROGRAM, Fusion
from poptransformer.graph import Node, Value

LOWERINGS: dict[str, Callable] = {}


@dataclasses.dataclass
class Context:
    """What a lowering may ask about the engine that traces it, and where it says what it took.

    Attributes:
      platform: JAX's name of it, "cpu", "gpu" or "tpu".
      custom_ops: names of the ops that run as kernels of this project.
      isa: the instruction set that these kernels run.
      no_custom_ops: why there are none, or no others, in words.
      allow_bfloat16: whether kernels may round float32 that they multiply to bfloat16 where that is faster. So it is beside
        packed weights, whose kernel does.
      specs: how parameters lie on the devices that lie there otherwise than the graph says, as pytrees of Specs.
      evaluate: (graph, inputs) -> list of outputs; traces a loop's body.
      fusion: which nodes run as step programs, or None: each node by itself.
      choices: what was taken for each node that was traced. A node that is traced twice counts once.
    """

    platform: str
    custom_ops: frozenset[str]
    isa: str = ""
    no_custom_ops: str = "custom_ops is false"
    allow_bfloat16: bool = False
    specs: dict[Value, object] = dataclasses.field(default_factory=dict)
    evaluate: Callable | None = None
    fusion: Fusion | None = None
    choices: dict[Node, Choice] = dataclasses.field(default_factory=dict)
    _kernels: list[str] = dataclasses.field(default_factory=list)
    _refusals: list[str] = dataclasses.field(default_factory=list)

    def use_kernel(self, name: str, refusal: Callable[[], str | None] | None = None, isa: Callable[[], str] | None = None):
        """Whether the op that is being lowered shall run as a kernel of this project; the answer is noted for reports.

        Args:
          name: the kernel's name in `custom_ops`.
          refusal: called where the kernel is there; says in words why it does not take these arrays, None if it does.
          isa: says which instruction set it runs for these arrays, where that is not always the Context's `isa`.
        """
        reason = (refusal() if refusal else None) if name in self.custom_ops else self.no_custom_ops
        if reason is None:
            self._kernels.append(f"{name} ({isa() if isa else self.isa})")
        else:
            self._refusals.append(reason)
        return reason is None

    @contextlib.contextmanager
    def lowering(self, node: Node):
        """Note what the lowering called inside the `with` block takes for a node, or for all that a step program computes."""
        outer = self._kernels, self._refusals
        stands_for = node.attributes["program"].nodes if node.op == STEP_PROGRAM else [node]
        self._kernels, self._refusals = [], []
        yield
        for one in stands_for:
            if self._kernels:
                self.choices[one] = Choice(one.op, f"kernel {', '.join(dict.fromkeys(self._kernels))}")
            else:
                self.choices[one] = Choice(one.op, "plain XLA", "; ".join(self._refusals) or "no kernel for this op")
        self._kernels, self._refusals = outer


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

"""XLA lowering of loop: one while_loop on the device."""

import jax.numpy as jnp
from jax import lax

from poptransformer.backends.xla.lowering import lowering


@lowering("loop")
def loop(context, keep_going, *carried, max_steps, body):
    # XLA:CPU drops axes of size 1 in front of a product's operand; were they left on a carried cache, the updated cache would
    # be wanted in two shapes, and be copied for each.
    shapes = [array.shape for array in carried]

    def squeezed(arrays):
        return [array.reshape(shape[1:] if shape[:1] == (1,) else shape) for array, shape in zip(arrays, shapes, strict=True)]

    def condition(state):
        step, keep_going, *_ = state
        return keep_going & (step < max_steps)

    def advance(state):
        step, _, *carried = state
        inputs = {f"carried_{i}": array.reshape(shape) for i, (array, shape) in enumerate(zip(carried, shapes, strict=True))}
        keep_going, *carried = context.evaluate(body, inputs | {"step": step})
        return (step + 1, keep_going, *squeezed(carried))

    _, _, *carried = lax.while_loop(condition, advance, (jnp.int32(0), keep_going, *squeezed(carried)))
    return tuple(array.reshape(shape) for array, shape in zip(carried, shapes, strict=True))

"""XLA lowering of loop: one while_loop on the device."""

import math

import jax.numpy as jnp
from jax import lax

from poptransformer.backends.xla.lowering import lowering


@lowering("loop")
def loop(context, keep_going, *carried, max_steps, body):
    # XLA:CPU merges all axes of a product's operand but the last two, and drops those of size 1. Were a carried cache not in
    # that shape already, the updated cache would be wanted in two shapes, and be copied for each. The attention kernel on the
    # other hand is given the cache as it is carried; a change of shape in between would cost it a copy.
    keeps_shapes = "attention" in context.custom_ops
    shapes = [array.shape for array in carried]

    def merged(arrays):
        if keeps_shapes:
            return arrays
        return [array.reshape(_merged_shape(shape)) for array, shape in zip(arrays, shapes, strict=True)]

    def condition(state):
        step, keep_going, *_ = state
        return keep_going & (step < max_steps)

    def advance(state):
        step, _, *carried = state
        inputs = {f"carried_{i}": array.reshape(shape) for i, (array, shape) in enumerate(zip(carried, shapes, strict=True))}
        keep_going, *carried = context.evaluate(body, inputs | {"step": step})
        return (step + 1, keep_going, *merged(carried))

    _, _, *carried = lax.while_loop(condition, advance, (jnp.int32(0), keep_going, *merged(carried)))
    return tuple(array.reshape(shape) for array, shape in zip(carried, shapes, strict=True))


def _merged_shape(shape):
    count = math.prod(shape[:-2])
    if len(shape) > 2:
        return shape[-2:] if count == 1 else (count, *shape[-2:])
    return shape[1:] if shape[:1] == (1,) else shape

"""XLA lowerings of the element-wise ops."""

import jax
import jax.numpy as jnp

from poptransformer.backends.xla.lowering import LOWERINGS, lowering


def _in_float32(function):
    """Compute in float32 and return the operand's dtype: 16-bit activations then round once."""
    return lambda x: function(x.astype(jnp.float32)).astype(x.dtype)


FUNCTIONS = {
    "neg": jnp.negative,
    "exp": _in_float32(jnp.exp),
    "log": _in_float32(jnp.log),
    "sqrt": _in_float32(jnp.sqrt),
    "tanh": _in_float32(jnp.tanh),
    "sigmoid": _in_float32(jax.nn.sigmoid),
    "relu": jax.nn.relu,
    "silu": _in_float32(jax.nn.silu),
    "gelu": _in_float32(lambda x: jax.nn.gelu(x, approximate=False)),
    "gelu_tanh": _in_float32(lambda x: jax.nn.gelu(x, approximate=True)),
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": jnp.divide,
    "minimum": jnp.minimum,
    "maximum": jnp.maximum,
    "equal": jnp.equal,
    "less": jnp.less,
    "less_equal": jnp.less_equal,
    "greater": jnp.greater,
    "greater_equal": jnp.greater_equal,
    "logical_and": jnp.logical_and,
    "logical_or": jnp.logical_or,
    "logical_not": jnp.logical_not,
    "select": jnp.where,
}


def _without_context(function):
    return lambda context, *arrays: function(*arrays)


LOWERINGS.update((name, _without_context(function)) for name, function in FUNCTIONS.items())


@lowering("cast")
def cast(context, x, dtype):
    return x.astype(dtype)

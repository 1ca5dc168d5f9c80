"""Activations by the names that Hugging Face configs use."""

from __future__ import annotations

from poptransformer import ops
from poptransformer.errors import UnsupportedError

ACTIVATIONS = {
    "gelu": ops.gelu,
    "gelu_new": ops.gelu_tanh,
    "gelu_fast": ops.gelu_tanh,
    "gelu_pytorch_tanh": ops.gelu_tanh,
    "relu": ops.relu,
    "silu": ops.silu,
    "swish": ops.silu,
    "tanh": ops.tanh,
    "sigmoid": ops.sigmoid,
}


def activation(name: str):
    """Return the op for a config's activation name.

    Raises: UnsupportedError with the list of names.
    """
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UnsupportedError(f"activation {name!r} is not supported; there are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]

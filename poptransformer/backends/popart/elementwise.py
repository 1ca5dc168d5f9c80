"""PopART lowerings of the element-wise ops. 16-bit floats are computed in float32 where ONNX has no op for the whole."""

import math

import numpy as np

from poptransformer.backends.popart.emitter import GRAPHCORE
from poptransformer.backends.popart.lowering import lowering

UNARY = {"neg": "Neg", "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "tanh": "Tanh", "sigmoid": "Sigmoid", "relu": "Relu"}
BINARY = {"add": "add", "sub": "sub", "mul": "mul", "div": "div", "minimum": "minimum", "maximum": "maximum"}
COMPARE = {"equal": "equal", "less": "less", "greater": "greater", "less_equal": "less_equal", "greater_equal": "greater_equal"}
LOGICAL = {"logical_and": "logical_and", "logical_or": "logical_or"}


def _unary(name):
    def lower(emitter, x):
        if name == "Relu" and not np.issubdtype(x.dtype, np.floating):
            return emitter.maximum(x, 0)
        return emitter.unary(name, x)

    return lower


def _method(name):
    return lambda emitter, *tensors: getattr(emitter, name)(*tensors)


for _name, _op in UNARY.items():
    lowering(_name)(_unary(_op))
for _name, _op in (BINARY | COMPARE | LOGICAL).items():
    lowering(_name)(_method(_op))
lowering("logical_not")(_method("logical_not"))
lowering("select")(_method("where"))


@lowering("silu")
def silu(emitter, x):
    return emitter.unary("Swish", x, GRAPHCORE)


@lowering("gelu")
def gelu(emitter, x):
    wide = emitter.widen(x)
    phi = emitter.add(emitter.unary("Erf", emitter.mul(wide, 1 / math.sqrt(2))), 1.0)
    return emitter.cast(emitter.mul(emitter.mul(wide, 0.5), phi), x.dtype)


@lowering("gelu_tanh")
def gelu_tanh(emitter, x):
    return emitter.unary("Gelu", x, GRAPHCORE)  # PopART's is the tanh approximation


@lowering("cast")
def cast(emitter, x, dtype):
    return emitter.cast(x, dtype)

"""Element-wise ops: arithmetic, comparison, logic, activations, select and cast.

One table instead of forty small files. Operands have the same dtype and broadcast as in NumPy; a Python number takes the
dtype of the other operand. Comparisons give bool.
"""

from __future__ import annotations

import math

import numpy as np

from poptransformer.graph import Spec, Value
from poptransformer.ops.op import define, emit, is_float, require, require_float, widen, wrap


def gelu_reference(x):
    """Gaussian error linear unit by the error function: x * Phi(x) (HF: gelu). Source: arXiv:1606.08415."""
    return 0.5 * x * (1 + np.vectorize(math.erf, otypes=[x.dtype])(x / math.sqrt(2)))


def gelu_tanh_reference(x):
    """GELU by its tanh approximation (HF: gelu_new, gelu_pytorch_tanh). Source: arXiv:1606.08415."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


UNARY = {
    "neg": np.negative,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": gelu_reference,
    "gelu_tanh": gelu_tanh_reference,
}
BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "minimum": np.minimum,
    "maximum": np.maximum,
}
COMPARE = {
    "equal": np.equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
}
LOGICAL = {"logical_and": np.logical_and, "logical_or": np.logical_or}


def broadcast_shape(*shapes):
    """The shape that NumPy's rule broadcasts the shapes to; refuses those that do not fit."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        require(False, "shapes do not broadcast")


def _infer_number(x):
    require(x.dtype != bool, "wants numbers, not bool")
    return [x]


def _infer_float(x):
    require_float(x)
    return [x]


def _infer_pair(x, y):
    require(x.dtype == y.dtype, "operands differ in dtype; cast one of them")
    return [Spec(broadcast_shape(x.shape, y.shape), x.dtype)]


def _infer_binary(x, y):
    require(x.dtype != bool, "wants numbers, not bool")
    return _infer_pair(x, y)


def _infer_div(x, y):
    require_float(x)
    return _infer_pair(x, y)


def _infer_compare(x, y):
    return [Spec(_infer_pair(x, y)[0].shape, bool)]


def _infer_logical(x, y):
    require(x.dtype == bool and y.dtype == bool, "wants bool operands")
    return _infer_pair(x, y)


def _infer_not(x):
    require(x.dtype == bool, "wants a bool operand")
    return [x]


def _infer_select(condition, x, y):
    require(condition.dtype == bool, "the condition must be bool")
    require(x.dtype == y.dtype, "the two choices differ in dtype")
    return [Spec(broadcast_shape(condition.shape, x.shape, y.shape), x.dtype)]


def _infer_cast(x, dtype):
    return [Spec(x.shape, dtype)]


def _one(function):
    return lambda *arrays: [function(*arrays)]


def _rounded_once(function):
    """Compute in float32 or wider and give the operand's dtype."""

    def reference(x):
        with np.errstate(over="ignore"):  # exp(-x) of a large negative x is infinite, and right to be
            return [function(widen(x)).astype(x.dtype) if is_float(x.dtype) else function(x)]

    return reference


for _name, _function in UNARY.items():
    define(_name, _infer_number if _name in ("neg", "relu") else _infer_float, _rounded_once(_function))
for _name, _function in BINARY.items():
    define(_name, _infer_div if _name == "div" else _infer_binary, _one(_function))
for _name, _function in COMPARE.items():
    define(_name, _infer_compare, _one(_function))
for _name, _function in LOGICAL.items():
    define(_name, _infer_logical, _one(_function))
define("logical_not", _infer_not, _one(np.logical_not))
define("select", _infer_select, _one(np.where))
define("cast", _infer_cast, lambda x, dtype: [x.astype(dtype)])


def _unary(name):
    def function(x: Value) -> Value:
        return emit(name, x)[0]

    function.__name__, function.__doc__ = name, f"Element-wise {name} of x [...]."
    return function


def _binary(name):
    def function(x, y) -> Value:
        like = x if isinstance(x, Value) else y
        return emit(name, wrap(x, like), wrap(y, like))[0]

    function.__name__, function.__doc__ = name, f"Element-wise {name} of x and y, which broadcast."
    return function


neg, exp, log, sqrt, tanh, sigmoid, relu, silu, gelu, gelu_tanh = (_unary(name) for name in UNARY)
add, sub, mul, div, minimum, maximum = (_binary(name) for name in BINARY)
equal, less, less_equal, greater, greater_equal = (_binary(name) for name in COMPARE)
logical_and, logical_or = (_binary(name) for name in LOGICAL)
logical_not = _unary("logical_not")


def select(condition: Value, x, y) -> Value:
    """x where the condition holds, y elsewhere; the three broadcast."""
    like = x if isinstance(x, Value) else y
    return emit("select", condition, wrap(x, like), wrap(y, like))[0]


def cast(x: Value, dtype) -> Value:
    """x [...] in another dtype; x itself when it has that dtype.

    Floats are cut towards zero on the way to integers; what does not fit there (NaN too) gives a number that is not defined.
    """
    dtype = np.dtype(dtype)
    return x if x.dtype == dtype else emit("cast", x, dtype=dtype)[0]


Value.__add__ = Value.__radd__ = add
Value.__mul__ = Value.__rmul__ = mul
Value.__sub__, Value.__truediv__, Value.__neg__ = sub, div, neg
Value.__rsub__ = lambda self, other: sub(other, self)
Value.__rtruediv__ = lambda self, other: div(other, self)
Value.__lt__, Value.__le__, Value.__gt__, Value.__ge__ = less, less_equal, greater, greater_equal
Value.__and__, Value.__or__, Value.__invert__ = logical_and, logical_or, logical_not

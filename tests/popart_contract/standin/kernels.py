"""What the operators compute, in NumPy: onnx's own reference, PopART's differences from it, and ai.graphcore.

A kernel takes (node, *arrays) and gives a list of arrays. A collective takes, and gives, lists with one array for each
replica. 16-bit products, sums and functions are computed in float32 and rounded once, as IPUs do with float partials.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import onnx
from onnx.reference.ops._op_list import load_op
from popart_contract.standin import dtypes
from popart_contract.standin.binding import NotModelled
from popart_contract.standin.errors import popart_runtime_error
from popart_contract.standin.facts import API

KERNELS: dict = {}
COLLECTIVES: dict = {}


def kernel(domain, *kinds):
    """Decorator that enters a function (node, *arrays) for operators."""

    def enter(function):
        KERNELS.update({(domain, kind): function for kind in kinds})
        return function

    return enter


def collective(*kinds):
    """Decorator that enters a function (node, values of each replica) for ai.graphcore operators."""

    def enter(function):
        COLLECTIVES.update({("ai.graphcore", kind): function for kind in kinds})
        return function

    return enter


def compute(node, arrays) -> list[np.ndarray]:
    """Run one node of one replica."""
    function = KERNELS.get((node.domain, node.kind)) or _by_reference
    if function is _by_reference and node.domain != "ai.onnx":
        raise NotModelled(f"{node.place}: the stand-in has no kernel of {node.domain}.{node.kind}")
    with np.errstate(all="ignore"):
        results = function(node, *arrays)
    return [np.asarray(result) for result in results]


def widened(function):
    """Compute in float32 what is float16, and round once."""

    @functools.wraps(function)
    def wide(node, *arrays):
        halves = [array is not None and array.dtype == np.float16 for array in arrays]
        results = function(
            node, *(array.astype(np.float32) if half else array for array, half in zip(arrays, halves, strict=True))
        )
        if halves[0]:
            return [y.astype(np.float16) if y.dtype == np.float32 else y for y in results]
        return results

    return wide


def _by_reference(node, *arrays):
    """The operator as onnx's ReferenceEvaluator has it, which knows no annotations."""
    if node.evaluator is None:
        proto = onnx.NodeProto()
        proto.CopyFrom(node.proto)
        del proto.attribute[:]
        proto.attribute.extend(item for item in node.proto.attribute if not item.name.startswith("__"))
        parameters = {"log": lambda *_: None, "opsets": {"": node.opset}, "verbose": 0, "new_ops": None}
        node.evaluator = load_op("", node.kind, node.opset)(proto, parameters)
    return node.evaluator.run(*arrays)


_REFERENCE_IN_FLOAT32 = (
    "ReduceSum", "ReduceMean", "ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceProd",
    "Sum", "Mean", "Exp", "Log", "Sqrt", "Tanh", "Sigmoid", "Sin", "Cos", "Erf", "Pow", "Reciprocal", "Gemm", "Softplus",
)  # fmt: skip
kernel("ai.onnx", *_REFERENCE_IN_FLOAT32)(widened(_by_reference))


# ---- where PopART differs from ONNX's reference


@kernel("ai.onnx", "ArgMax", "ArgMin")
def _argmax(node, x):
    """INT32, and the first of equals."""
    axis, keep = node.attributes.get("axis", 0), node.attributes.get("keepdims", 1)
    found = (np.argmax if node.kind == "ArgMax" else np.argmin)(x, axis).astype(np.int32)
    return [np.expand_dims(found, axis) if keep else found]


@kernel("ai.onnx", "TopK")
def _topk(node, x, k):
    """Indices are INT32; of equals the first comes first."""
    axis, k = node.attributes.get("axis", -1), int(np.reshape(k, ()))
    if k > x.shape[axis]:
        raise popart_runtime_error(f"{node.place}: K is {k}, the axis has {x.shape[axis]}")
    wide = x.astype(np.float64) if x.dtype.kind == "f" else x.astype(np.int64)
    order = np.argsort(-wide if node.attributes.get("largest", 1) else wide, axis, kind="stable")
    order = np.take(order, range(k), axis)
    return [np.take_along_axis(x, order, axis), order.astype(np.int32)]


@kernel("ai.onnx", "Softmax", "LogSoftmax")
@widened
def _softmax(node, x):
    """Over everything from the axis on, flattened: the meaning before opset 13. The axis is 1 unless given."""
    axis = node.attributes.get("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    rows = x.reshape(int(np.prod(x.shape[:axis], dtype=np.int64)), -1)
    shifted = rows - rows.max(-1, keepdims=True)
    total = np.exp(shifted).sum(-1, keepdims=True)
    y = shifted - np.log(total) if node.kind == "LogSoftmax" else np.exp(shifted) / total
    return [y.reshape(x.shape).astype(x.dtype)]


@kernel("ai.onnx", "MatMul")
def _matmul(node, a, b, scale=None):
    if scale is not None:
        _check_scale(node, scale)
        return [(a.astype(np.float32) @ b.astype(np.float32) * np.float32(2.0) ** int(scale)).astype(np.float16)]
    wide = [x.astype(np.float32) if x.dtype == np.float16 else x for x in (a, b)]
    output = node.attributes.get("__output_type")
    return [np.matmul(*wide).astype(dtypes.NUMPY[output] if output else a.dtype)]


@kernel("ai.onnx", "Gather")
@kernel("ai.graphcore", "GroupedGather")
def _gather(node, table, indices):
    """Indices from the end came with opset 11; what lies outside is not defined, so it is an error here."""
    axis, groups = node.attributes.get("axis", 0), node.attributes.get("group_size", 1)
    size = table.shape[axis]
    if indices.size and not 0 <= indices.min() <= indices.max() < size:
        raise popart_runtime_error(f"{node.place}: indices {indices.min()} .. {indices.max()}, the axis has {size}")
    if groups > 1:
        return [np.stack([np.take(t, i, axis - 1 if axis > 0 else axis) for t, i in zip(table, indices, strict=True)])]
    return [np.take(table, indices, axis)]


@kernel("ai.onnx", "Scatter", "ScatterElements")
def _scatter(node, x, indices, updates):
    y = x.copy()
    np.put_along_axis(y, indices.astype(np.int64), updates, node.attributes.get("axis", 0))
    return [y]


@kernel("ai.onnx", "Cast")
def _cast(node, x):
    return [x.astype(dtypes.NUMPY[dtypes.ONNX_NAMES[node.attributes["to"]]])]


@kernel("ai.onnx", "Slice")
def _slice(node, x, starts, ends, axes=None, steps=None):
    """Slice-10; NumPy's own limits are ONNX's."""
    axes = range(len(starts)) if axes is None else axes.tolist()
    steps = [1] * len(starts) if steps is None else steps.tolist()
    places = [slice(None)] * x.ndim
    for axis, start, end, step in zip(axes, starts.tolist(), ends.tolist(), steps, strict=True):
        places[axis] = slice(start, None if step < 0 and end < -x.shape[axis] else end, step)
    return [x[tuple(places)]]


_COMPARED = {"Equal": np.equal, "Less": np.less, "Greater": np.greater}


@kernel("ai.onnx", *_COMPARED)
def _compare(node, x, y):
    """Integers of two widths can be compared."""
    return [_COMPARED[node.kind](x, y)]


@kernel("ai.onnx", "Constant")
def _constant(node):
    return [node.constant]


# ---- ai.graphcore, one array at a time


@kernel("ai.graphcore", "Gelu")
@widened
def _gelu(node, x):
    """By the tanh approximation, as popnn has it."""
    return [(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))).astype(x.dtype)]


@kernel("ai.graphcore", "GeluErf")
@widened
def _gelu_erf(node, x):
    return [(0.5 * x * (1 + np.vectorize(math.erf, otypes=[x.dtype])(x / np.sqrt(2)))).astype(x.dtype)]


@kernel("ai.graphcore", "Swish")
@widened
def _swish(node, x):
    return [(x / (1 + np.exp(-x))).astype(x.dtype)]


@kernel("ai.graphcore", "Expm1")
@widened
def _expm1(node, x):
    return [np.expm1(x)]


@kernel("ai.graphcore", "Log1p")
@widened
def _log1p(node, x):
    return [np.log1p(x)]


@kernel("ai.graphcore", "Scale")
@widened
def _scale(node, x):
    return [x * x.dtype.type(node.attributes.get("scale", 1.0))]


@kernel("ai.graphcore", "GroupNormalization")
@widened
def _group_normalization(node, x, scale, bias):
    """x [N, C, ...]: each group of channels of each sample is normalised.

    The third output is called Var, but popnn gives the inverse of the standard deviation.
    """
    groups, shape = node.attributes["num_groups"], x.shape
    parts = x.reshape(shape[0] * groups, -1)
    mean, variance = parts.mean(-1, keepdims=True), parts.var(-1, keepdims=True)
    inverse = 1 / np.sqrt(variance + np.float32(node.attributes.get("epsilon", 1e-5)))
    column = (-1, *[1] * (len(shape) - 2))
    y = ((parts - mean) * inverse).reshape(shape) * scale.reshape(column) + bias.reshape(column)
    return [y.astype(x.dtype), mean.reshape(-1).astype(x.dtype), inverse.reshape(-1).astype(x.dtype)]


def _window(node, shape, index):
    """The slices that an index and the attributes axes and sizes choose."""
    places = [slice(None)] * len(shape)
    for axis, size, start in zip(node.attributes["axes"], node.attributes["sizes"], index.ravel().tolist(), strict=True):
        if not 0 <= start <= shape[axis] - size:
            raise popart_runtime_error(f"{node.place}: [{start}, {start + size}) leaves axis {axis} of {shape[axis]}")
        places[axis] = slice(start, start + size)
    return tuple(places)


@kernel("ai.graphcore", "DynamicSlice")
def _dynamic_slice(node, x, index, like=None):
    y = x[_window(node, x.shape, index)]
    return [y if like is None else y.reshape(like.shape)]


@kernel("ai.graphcore", "DynamicUpdate", "DynamicAdd")
def _dynamic_update(node, x, index, update):
    y, window = x.copy(), _window(node, x.shape, index)
    y[window] = update if node.kind == "DynamicUpdate" else y[window] + update
    return [y]


@kernel("ai.graphcore", "DynamicZero")
def _dynamic_zero(node, x, index):
    y = x.copy()
    y[_window(node, x.shape, index)] = 0
    return [y]


_BITWISE = {"BitwiseAnd": np.bitwise_and, "BitwiseOr": np.bitwise_or, "BitwiseXor": np.bitwise_xor, "BitwiseNot": np.invert,
            "BitwiseXnor": lambda x, y: np.invert(np.bitwise_xor(x, y)), "Atan2": np.arctan2, "Fmod": np.fmod,
            "Remainder": np.remainder}  # fmt: skip


@kernel("ai.graphcore", *_BITWISE)
def _by_numpy(node, *arrays):
    return [_BITWISE[node.kind](*arrays)]


@kernel("ai.graphcore", "IncrementMod")
def _increment_mod(node, x):
    return [np.fmod(x + x.dtype.type(node.attributes["increment"]), x.dtype.type(node.attributes["modulus"]))]


@kernel("ai.graphcore", "Reshape")
def _reshape(node, x):
    return [x.reshape(node.attributes["shape"])]


@kernel("ai.graphcore", "Slice")
def _slice_by_attributes(node, x):
    starts, ends, axes = (node.attributes.get(name, []) for name in ("starts", "ends", "axes"))
    places = [slice(None)] * x.ndim
    steps = node.attributes.get("steps") or [1] * len(starts)
    for axis, start, end, step in zip(axes or range(len(starts)), starts, ends, steps, strict=True):
        places[axis] = slice(start, end, step)
    return [x[tuple(places)]]


@kernel("ai.graphcore", "Reverse")
def _reverse(node, x):
    return [np.flip(x, node.attributes["dimensions"])]


@kernel("ai.graphcore", "Nop", "Detach", "PrintTensor")
def _pass(node, x):
    return [x]


@kernel("ai.graphcore", "Init")
def _init(node):
    kinds = {number: name for name, number in API["DataType"]["values"].items()}
    return [np.zeros(node.attributes["shape"], dtypes.NUMPY[kinds[node.attributes["data_type"]]])]


def _check_scale(node, scale):
    if not -32 <= int(scale) < 32:
        raise popart_runtime_error(f"{node.place}: log2 scale {int(scale)} is not in [-32, 32)")


@kernel("ai.graphcore", "Pow2ScaleThenCast")
def _pow2_scale_then_cast(node, x, scale):
    """cast(x * 2^s). What overflows is not described, so it is an error here."""
    _check_scale(node, scale)
    y = (x.astype(np.float32) * np.float32(2.0) ** int(scale)).astype(dtypes.NUMPY[node.attributes["to"]])
    if not np.isfinite(y.astype(np.float32)).all():
        raise popart_runtime_error(f"{node.place}: a number is beyond {node.attributes['to']}; choose another scale")
    return [y]


@kernel("ai.graphcore", "CastThenPow2Scale")
def _cast_then_pow2_scale(node, x, scale):
    _check_scale(node, scale)
    return [(x.astype(np.float32) * np.float32(2.0) ** int(scale)).astype(np.float16)]


# ---- collectives: all replicas at once


def _groups(node, replicas):
    """Lists of replicas that talk to each other."""
    grouping = node.attributes.get("__collectiveReplicaGrouping")
    group = node.attributes.get("__collectiveCommGroup")
    if grouping:
        _, stride, size = grouping
    elif group and group[0] in (1, 2):
        size = group[1]
        stride = 1 if group[0] == 1 else replicas // size
    else:
        stride, size = 1, replicas
    groups = {}
    for replica in range(replicas):
        groups.setdefault((replica // (stride * size), replica % stride), []).append(replica)
    assert all(len(members) == size for members in groups.values()), (node.place, groups)
    return list(groups.values())


_REDUCE = {0: np.sum, 1: np.mean, 2: np.prod, 3: np.min, 4: np.max}


def _reduced(node, values):
    function = _REDUCE.get(node.attributes.get("__collectiveOperator", 0))
    if function is None:
        raise NotModelled(f"{node.place}: the stand-in has no collective operator {node.attributes['__collectiveOperator']}")
    wide = np.stack([value.astype(np.float32) if value.dtype == np.float16 else value for value in values])
    return function(wide, axis=0).astype(values[0].dtype)


@collective("ReplicatedAllReduce", "ReplicatedAllReduceInplace")
def _all_reduce(node, values):
    results = [None] * len(values)
    for members in _groups(node, len(values)):
        total = _reduced(node, [values[member] for member in members])
        for member in members:
            results[member] = total
    return [results]


@collective("ReplicatedAllGather")
def _all_gather(node, values):
    """Rank 1, replica-major."""
    results = [None] * len(values)
    for members in _groups(node, len(values)):
        whole = np.concatenate([values[member].ravel() for member in members])
        for member in members:
            results[member] = whole
    return [results]

"""The op set. One file a family: signature, shape and dtype rule, NumPy reference."""

from poptransformer.ops.attention import attention
from poptransformer.ops.collective import all_gather, all_reduce, rank_index
from poptransformer.ops.elementwise import (
    add,
    cast,
    div,
    equal,
    exp,
    gelu,
    gelu_tanh,
    greater,
    greater_equal,
    less,
    less_equal,
    log,
    logical_and,
    logical_not,
    logical_or,
    maximum,
    minimum,
    mul,
    neg,
    relu,
    select,
    sigmoid,
    silu,
    sqrt,
    sub,
    tanh,
)
from poptransformer.ops.layer_norm import layer_norm
from poptransformer.ops.linear import linear, matmul
from poptransformer.ops.loop import loop
from poptransformer.ops.op import OPS
from poptransformer.ops.packed_linear import packed_gather, packed_linear
from poptransformer.ops.reduce import argmax, reduce_any, reduce_max, reduce_sum
from poptransformer.ops.rms_norm import rms_norm
from poptransformer.ops.rope import rope
from poptransformer.ops.sample import mark_tokens, repetition_penalty, sample
from poptransformer.ops.shape import (
    broadcast_to,
    concat,
    dynamic_update,
    gather,
    reshape,
    slice_axis,
    split,
    transpose,
)
from poptransformer.ops.softmax import softmax, token_log_prob
from poptransformer.ops.token_shift import token_shift
from poptransformer.ops.wkv import wkv

__all__ = [
    "OPS", "add", "all_gather", "all_reduce", "argmax", "attention", "broadcast_to", "cast", "concat", "div",
    "dynamic_update", "equal", "exp", "gather", "gelu", "gelu_tanh", "greater", "greater_equal", "layer_norm", "less",
    "less_equal", "linear", "log", "logical_and", "logical_not", "logical_or", "loop", "mark_tokens", "matmul", "maximum",
    "minimum", "mul", "neg", "packed_gather", "packed_linear", "rank_index", "reduce_any", "reduce_max", "reduce_sum",
    "relu", "repetition_penalty", "reshape", "rms_norm", "rope", "sample", "select", "sigmoid", "silu", "slice_axis",
    "softmax", "split", "sqrt", "sub", "tanh", "token_log_prob", "token_shift", "transpose", "wkv",
]  # fmt: skip

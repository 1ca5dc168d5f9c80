"""The operators that programs use: of ai.onnx (opset 10) and ai.graphcore (1), known to PopART in SDK 3.2 and 3.4.

name -> attributes with their types. Attributes that begin with two underscores are PopART's annotations of any node.
"""

_NONE: dict[str, str] = {}
_AXIS = {"axis": "INT"}
_REDUCE = {"axes": "INTS", "keepdims": "INT"}
_DYNAMIC = {"axes": "INTS", "sizes": "INTS"}

ONNX = {
    "Add": _NONE, "And": _NONE, "ArgMax": _AXIS | {"keepdims": "INT"}, "Cast": {"to": "INT"}, "Concat": _AXIS,
    "Constant": {"value": "TENSOR"}, "Cos": _NONE, "Div": _NONE, "Equal": _NONE, "Erf": _NONE, "Exp": _NONE, "Expand": _NONE,
    "Floor": _NONE, "Gather": _AXIS, "Greater": _NONE, "Identity": _NONE, "IsNaN": _NONE, "Less": _NONE, "Log": _NONE,
    "Loop": {"body": "GRAPH"}, "MatMul": _NONE, "Max": _NONE, "Min": _NONE, "Mul": _NONE, "Neg": _NONE, "Not": _NONE,
    "Or": _NONE, "Pad": {"mode": "STRING", "pads": "INTS", "value": "FLOAT"}, "ReduceMax": _REDUCE, "ReduceMean": _REDUCE,
    "ReduceSum": _REDUCE, "Relu": _NONE, "Reshape": _NONE, "Sigmoid": _NONE, "Sin": _NONE, "Slice": _NONE, "Softmax": _AXIS,
    "Split": _AXIS | {"split": "INTS"}, "Sqrt": _NONE, "Sub": _NONE, "Tanh": _NONE, "TopK": _AXIS,
    "Transpose": {"perm": "INTS"}, "Where": _NONE,
}  # fmt: skip
GRAPHCORE = {
    "BitwiseOr": _NONE, "BitwiseXor": _NONE, "DynamicSlice": _DYNAMIC, "DynamicUpdate": _DYNAMIC, "Gelu": _NONE,
    "GroupNormalization": {"num_groups": "INT", "epsilon": "FLOAT"}, "ReplicatedAllGather": _NONE,
    "ReplicatedAllReduce": _NONE, "Swish": _NONE,
}  # fmt: skip
ANNOTATIONS = {
    "__ipu_number": "INT", "__pipeline_stage": "INT", "__outline": "STRINGS", "__partials_type": "STRING",
    "__output_type": "STRING",
}  # fmt: skip
TABLE = {"": ONNX, "ai.graphcore": GRAPHCORE}

# The one use of int64: shapes, bounds and counts, by (operator, place among its inputs). Everything else is 32 bits.
INT64_PLACES = {("Reshape", 1), ("Expand", 1), ("Slice", 1), ("Slice", 2), ("Slice", 3), ("TopK", 1), ("Loop", 0)}
# What PopART keeps for itself: inputs and outputs must not contain these.
RESERVED = (
    "Step___", "Init___", "Index___", "Accum___", "Accl___", "Gradient___", "Iterator___", "LoopCond___", "ConstValue___",
    "Stashed___", "Restored___", "lossScaling_", "randomSeed___",
)  # fmt: skip

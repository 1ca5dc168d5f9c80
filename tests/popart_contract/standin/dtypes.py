"""PopART's names of element types, ONNX's numbers and NumPy's dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from onnx import TensorProto

NUMPY = {
    "FLOAT": np.float32, "FLOAT16": np.float16, "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64,
    "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64, "BOOL": np.bool_, "DOUBLE": np.float64,
    # exponent bias 8 and 16, no infinity, and NaN where other formats have minus zero
    "FLOAT8_143": ml_dtypes.float8_e4m3fnuz, "FLOAT8_152": ml_dtypes.float8_e5m2fnuz,
    "COMPLEX64": np.complex64, "COMPLEX128": np.complex128, "BFLOAT16": ml_dtypes.bfloat16,
}  # fmt: skip
NUMPY = {name: np.dtype(dtype) for name, dtype in NUMPY.items()}
NAMES = {dtype: name for name, dtype in NUMPY.items()}
ONNX_NAMES = {number: name for name, number in TensorProto.DataType.items()}
# FACTS (e): what the importer reads, and what of it reaches a device.
IMPORTED = {"FLOAT", "UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64", "STRING", "BOOL", "FLOAT16", "DOUBLE", "UINT32",
            "UINT64", "COMPLEX64", "COMPLEX128", "BFLOAT16", "UNDEFINED"}  # fmt: skip
LOWERED = {"FLOAT", "FLOAT16", "INT32", "UINT32", "INT16", "UINT16", "INT8", "UINT8", "BOOL", "FLOAT8_143", "FLOAT8_152"}
NARROWED = {"INT64", "UINT64"}  # cast to 32 bits while enableSupportedDataTypeCasting is on


def name_of(dtype) -> str:
    """PopART's name of a NumPy dtype."""
    return NAMES[np.dtype(dtype)]

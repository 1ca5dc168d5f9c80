"""Precisions: which dtype the weights, the activations and the KV cache have.

Sums, softmax and norms are computed in float32 whatever the precision, and logits are float32. Packed weight formats
(fp8, int8, int4) join this table with the `linear` op that reads them.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from poptransformer.errors import UnsupportedError
from poptransformer.graph import bfloat16

DTYPES = {"fp32": np.dtype(np.float32), "bf16": bfloat16, "fp16": np.dtype(np.float16)}


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes that go with one value of the key `precision`."""

    name: str
    weight_dtype: np.dtype
    dtype: np.dtype
    cache_dtype: np.dtype


def precision(name: str, kv_cache: str | None = None) -> Precision:
    """Look up a precision by the name used in configs.

    Args:
      name: "fp32", "bf16" or "fp16".
      kv_cache: the same names; None takes the activations' dtype.
    Raises: UnsupportedError for another name, with the list.
    """
    dtype = _dtype("precision", name)
    return Precision(name, dtype, dtype, dtype if kv_cache is None else _dtype("kv_cache", kv_cache))


def _dtype(key, name):
    if not isinstance(name, str) or name not in DTYPES:
        raise UnsupportedError(f"{key}={name!r} is not supported; this version has {', '.join(DTYPES)}")
    return DTYPES[name]

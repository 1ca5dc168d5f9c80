"""Precisions: which dtype the weights, the activations and the KV cache have.

Sums, softmax and norms are computed in float32 whatever the precision, and logits are float32. In int8, int4 and fp8 the
matrices are packed (see packing.py), and so is an embedding that the head shares; the head is int8 in all of them, which takes
as many bytes as fp8 and is off by less. All else, and the activations, are float32, the KV cache float16.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from poptransformer.errors import UnsupportedError
from poptransformer.float8 import FLOAT8
from poptransformer.graph import bfloat16
from poptransformer.kv_cache import INT8
from poptransformer.packing import BITS, GROUP_SIZES, WHOLE_ROW

DEFAULT_GROUP_SIZE = 32
DTYPES = {"fp32": np.dtype(np.float32), "bf16": bfloat16, "fp16": np.dtype(np.float16)}
CACHE_DTYPES = DTYPES | {"fp8": FLOAT8, "int8": INT8}


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes that go with one value of the key `precision`; `packing` is (kind, group_size), or None for plain weights."""

    name: str
    weight_dtype: np.dtype
    dtype: np.dtype
    cache_dtype: np.dtype
    packing: tuple[str, int] | None = None

    def __str__(self):
        if self.packing is None or self.name == "fp8" or self.packing[1] == DEFAULT_GROUP_SIZE:
            return self.name
        return f"{self.name}, {'one group a row' if self.packing[1] == WHOLE_ROW else f'groups of {self.packing[1]}'}"


def precision(name: str, kv_cache: str | None = None, group_size: int | None = None) -> Precision:
    """Look up a precision by the name used in configs.

    Args:
      name: "fp32", "bf16", "fp16", "int8", "int4" or "fp8".
      kv_cache: "fp32", "bf16", "fp16", "fp8" or "int8" (see kv_cache.py); None takes the activations' dtype, float16 beside
        packed weights.
      group_size: inputs that share a scale, for int8 and int4: 32 (None takes that), 64, 128, or -1 for the whole row;
        fp8 has one scale a row, for which None stands too.
    Raises: UnsupportedError for another name, with the list.
    """
    cache_dtype = None if kv_cache is None else _look_up("kv_cache", kv_cache, CACHE_DTYPES)
    if name == "fp8":
        if group_size not in (None, WHOLE_ROW):
            raise UnsupportedError(
                f"group_size={group_size!r} is not supported for fp8, which has one scale a row; leave it out"
            )
        return Precision(name, DTYPES["fp32"], DTYPES["fp32"], cache_dtype or DTYPES["fp16"], (name, WHOLE_ROW))
    if isinstance(name, str) and name in BITS:
        group_size = DEFAULT_GROUP_SIZE if group_size is None else group_size
        if isinstance(group_size, bool) or group_size not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES))
            raise UnsupportedError(f"group_size={group_size!r} is not supported; there are {sizes} (-1: the whole row)")
        return Precision(name, DTYPES["fp32"], DTYPES["fp32"], cache_dtype or DTYPES["fp16"], (name, group_size))
    dtype = _look_up("precision", name, DTYPES, BITS)
    if group_size is not None:
        raise UnsupportedError(f"group_size={group_size!r} goes with precision int8 or int4, not with {name}")
    return Precision(name, dtype, dtype, cache_dtype or dtype)


def _look_up(key, name, table, *others):
    if not isinstance(name, str) or name not in table:
        known = ", ".join(word for words in (table, *others) for word in words)
        raise UnsupportedError(f"{key}={name!r} is not supported; this version has {known}")
    return table[name]

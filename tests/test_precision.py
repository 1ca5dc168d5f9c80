"""Precisions by the names that configs use."""

import ml_dtypes
import numpy as np
import pytest

from poptransformer import UnsupportedError
from poptransformer.graph import bfloat16
from poptransformer.precision import precision

CACHES = {
    "fp32": np.float32, "bf16": bfloat16, "fp16": np.float16, "fp8": ml_dtypes.float8_e4m3fn, "int8": np.int8,
}  # fmt: skip


@pytest.mark.parametrize("name, dtype", [("fp32", np.float32), ("bf16", bfloat16), ("fp16", np.float16)])
def test_dtypes(name, dtype):
    found = precision(name)
    assert (found.name, found.weight_dtype, found.dtype, found.cache_dtype) == (name, dtype, dtype, dtype)
    for cache, cache_dtype in CACHES.items():
        mixed = precision(name, cache)
        assert (mixed.weight_dtype, mixed.dtype, mixed.cache_dtype) == (dtype, dtype, cache_dtype)


@pytest.mark.parametrize("name", ["int5", "float32", "FP32", "", 16])
def test_other_names_are_refused_with_the_list(name):
    with pytest.raises(UnsupportedError) as caught:
        precision(name)
    assert str(caught.value) == f"precision={name!r} is not supported; this version has fp32, bf16, fp16, int8, int4, fp8"
    with pytest.raises(NotImplementedError, match="kv_cache=.* is not supported; this version has fp32, bf16, fp16, fp8, int8"):
        precision("fp32", name)


def test_packed_precisions():
    found = precision("int4")
    assert (found.packing, found.dtype, found.cache_dtype, str(found)) == (("int4", 32), np.float32, np.float16, "int4")
    found = precision("int8", "fp32", -1)
    assert (found.packing, found.cache_dtype, str(found)) == (("int8", -1), np.float32, "int8, one group a row")
    assert precision("bf16").packing is None
    for group_size in (None, -1):
        found = precision("fp8", group_size=group_size)
        assert (found.packing, found.dtype, found.cache_dtype, str(found)) == (("fp8", -1), np.float32, np.float16, "fp8")


def test_group_sizes_are_checked():
    for size in (0, 48, True, "32"):
        with pytest.raises(UnsupportedError, match="group_size=.* is not supported; there are 32, 64, 128, -1"):
            precision("int4", group_size=size)
    with pytest.raises(
        UnsupportedError, match="group_size=32 is not supported for fp8, which has one scale a row; leave it out"
    ):
        precision("fp8", group_size=32)
    with pytest.raises(UnsupportedError, match="group_size=32 goes with precision int8 or int4, not with fp32"):
        precision("fp32", group_size=32)

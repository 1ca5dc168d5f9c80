"""Precisions by the names that configs use."""

import numpy as np
import pytest

from poptransformer import UnsupportedError
from poptransformer.graph import bfloat16
from poptransformer.precision import precision


@pytest.mark.parametrize("name, dtype", [("fp32", np.float32), ("bf16", bfloat16), ("fp16", np.float16)])
def test_dtypes(name, dtype):
    found = precision(name)
    assert (found.name, found.weight_dtype, found.dtype, found.cache_dtype) == (name, dtype, dtype, dtype)
    for cache, cache_dtype in (("fp32", np.float32), ("bf16", bfloat16), ("fp16", np.float16)):
        mixed = precision(name, cache)
        assert (mixed.weight_dtype, mixed.dtype, mixed.cache_dtype) == (dtype, dtype, cache_dtype)


@pytest.mark.parametrize("name", ["int8", "float32", "FP32", "", 16])
def test_other_names_are_refused_with_the_list(name):
    with pytest.raises(UnsupportedError) as caught:
        precision(name)
    assert str(caught.value) == f"precision={name!r} is not supported; this version has fp32, bf16, fp16"
    with pytest.raises(NotImplementedError, match="kv_cache=.* is not supported; this version has fp32, bf16, fp16"):
        precision("fp32", name)

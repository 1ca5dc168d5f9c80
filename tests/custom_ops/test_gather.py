"""The gather kernel copies rows and refuses indices outside the table."""

import jax
import ml_dtypes
import numpy as np
import pytest

from poptransformer.backends.xla import custom_ops

try:
    custom_ops.load_cpu_library()
except custom_ops.MissingLibraryError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16, np.int8])
@pytest.mark.parametrize("width", [1, 3, 128])
def test_rows_are_copied(dtype, width):
    table = np.random.default_rng(0).integers(-100, 100, (7, width)).astype(dtype)
    for indices in ([[0, 6, 3], [3, 3, 1]], [5], []):
        indices = np.array(indices, np.int32)
        np.testing.assert_array_equal(np.asarray(jax.jit(custom_ops.gather)(table, indices)), table[indices])


@pytest.mark.parametrize("index", [-1, 7])
def test_an_index_outside_the_table_is_refused(index):
    with pytest.raises(Exception, match=rf"gather: index {index} is outside a table of 7 rows"):
        jax.block_until_ready(jax.jit(custom_ops.gather)(np.ones((7, 2), np.float32), np.int32([0, index])))

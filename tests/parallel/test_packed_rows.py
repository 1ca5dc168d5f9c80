"""Packed weights that lie row by row, as plain XLA has them, on ranks and stages."""

import numpy as np
import pytest
from conftest import REPOSITORY

from poptransformer import Session

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.mark.parametrize("precision", ["int8", "int4", "fp8"])
def test_ranks_and_stages_have_the_scores_of_the_reference(precision):
    """Each rank's part of a row has groups of its own, so ranks are compared with NumPy's ranks."""
    for devices, like in (({"num_replicas": 2}, {"num_replicas": 2}), ({"layers_per_device": [1, 1]}, {})):
        scores = []
        for engine in ({"backend": "reference"} | like, {"custom_ops": False} | devices):
            folder = REPOSITORY / "tests/golden/llama"
            with Session(folder, precision=precision, max_length=32, kv_cache="fp32", **engine) as session:
                scores.append(session.score(IDS))
        np.testing.assert_allclose(scores[1], scores[0], rtol=1e-4, atol=1e-4)

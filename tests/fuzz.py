"""How long tests with random problems run.

POPTRANSFORMER_FUZZ=2000 lets each of them try so many problems, new ones each time; by default they try a few, always the same.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

VARIABLE = "POPTRANSFORMER_FUZZ"


def fuzz_settings(few: int) -> settings:
    """Settings of hypothesis that try `few` problems, or as many as the environment says."""
    many = int(os.environ.get(VARIABLE, "0"))
    return settings(
        max_examples=many or few, derandomize=not many, database=None, deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip

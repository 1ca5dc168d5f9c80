"""For each rule a pair: a minimal model that breaks it, and the same model put right."""

from __future__ import annotations

CASES: dict = {}


def case(function):
    """Decorator: a function named after the rule, which gives (broken, fixed), each a Given.

    Another case of a rule has a name of its own after two underscores.
    """
    assert function.__name__ not in CASES
    CASES[function.__name__] = function
    return function


from popart_contract.cases import loops, operators, pipeline, pitfalls, placement, protos, replicas, types  # noqa: E402

__all__ = ["CASES", "case", "loops", "operators", "pitfalls", "pipeline", "placement", "protos", "replicas", "types"]

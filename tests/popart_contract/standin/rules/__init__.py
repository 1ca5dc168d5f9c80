"""The rules of the loader: one small function for each fact, named after it.

`fact_c_...` is a rule of section (c) of the facts. A model rule takes the ModelView and looks at the whole; a node rule
takes a TypedNode, when the types of its inputs are known, before it is typed itself. Both yield what is wrong, in words.
A rule that begins with `strict_` is the stand-in's own: PopART would accept the model and do something else than meant.
"""

from __future__ import annotations

from collections.abc import Callable

MODEL_RULES: dict[str, Callable] = {}
NODE_RULES: dict[str, Callable] = {}


def model_rule(function):
    """Decorator: (model: ModelView) -> problems."""
    MODEL_RULES[function.__name__] = function
    return function


def node_rule(function):
    """Decorator: (node: TypedNode) -> problems."""
    NODE_RULES[function.__name__] = function
    return function


from popart_contract.standin.rules import (  # noqa: E402 - they fill the tables
    loops,
    operators,
    pipeline,
    pitfalls,
    placement,
    protos,
    replicas,
    types,
)

__all__ = [
    "MODEL_RULES",
    "NODE_RULES",
    "loops",
    "operators",
    "pitfalls",
    "pipeline",
    "placement",
    "protos",
    "replicas",
    "types",
]

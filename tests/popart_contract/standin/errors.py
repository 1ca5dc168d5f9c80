"""The exceptions of the stand-in, named as PopART's."""

from __future__ import annotations


class popart_exception(Exception):
    """What PopART raises."""


class popart_runtime_error(popart_exception):
    """What PopART raises while it runs."""


class poplar_exception(Exception):
    """What Poplar raises."""


class poplibs_exception(Exception):
    """What the Poplar libraries raise."""


class OutOfMemoryException(popart_exception):
    """A model does not fit the tiles. The stand-in has no memory to run out of and never raises it."""


class Refusal(popart_exception):
    """A model or a call breaks rules. `rules` names them, in the order of the problems.

    Args:
      problems: (name of the rule, what is wrong) pairs.
    """

    def __init__(self, problems):
        self.problems = list(problems)
        self.rules = list(dict.fromkeys(rule for rule, _ in self.problems))
        super().__init__("\n".join(f"{rule}: {text}" for rule, text in self.problems))


def refuse(rule: str, text: str):
    """Raise a Refusal by one rule."""
    raise Refusal([(rule, text)])

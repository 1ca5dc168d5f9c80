"""Sampling: which settings the rows of a program use. The others are constants of its graph, and cost nothing."""

from __future__ import annotations

import dataclasses
import re

from poptransformer.errors import UserError

SETTINGS = ("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty")
_NAME = re.compile(r"(greedy|all|top(?P<top_k>[1-9]\d*))(?P<flags>(-p)?(-m)?(-r)?)")


@dataclasses.dataclass(frozen=True)
class Sampling:
    """What a program can do when it chooses a token.

    Attributes:
      is_drawn: whether rows may have a temperature; False: the best token each time.
      top_k: the largest top_k of any row; 0: no row has one.
      use_top_p, use_min_p, use_repetition_penalty: whether rows may have that setting.
    """

    is_drawn: bool = False
    top_k: int = 0
    use_top_p: bool = False
    use_min_p: bool = False
    use_repetition_penalty: bool = False

    @property
    def name(self) -> str:
        """As in a graph's name: greedy, all, top5; with -p, -m and -r for top_p, min_p and repetition_penalty."""
        base = f"top{self.top_k}" if self.top_k else "all"
        flags = {"-p": self.use_top_p, "-m": self.use_min_p} if self.is_drawn else {}
        flags |= {"-r": self.use_repetition_penalty}
        return (base if self.is_drawn else "greedy") + "".join(flag for flag, is_used in flags.items() if is_used)

    @classmethod
    def parse(cls, name: str) -> Sampling:
        """The Sampling of a name. Raises: UserError for another."""
        match = _NAME.fullmatch(name)
        if not match:
            raise UserError(f"sampling {name!r}: wanted greedy, all or topN, with -p, -m and -r in this order")
        flags, is_drawn = match["flags"], not name.startswith("greedy")
        if not is_drawn and flags not in ("", "-r"):
            raise UserError(f"sampling {name!r}: greedy takes -r only; top_p and min_p choose among drawn tokens")
        return cls(is_drawn, int(match["top_k"] or 0), "-p" in flags, "-m" in flags, "-r" in flags)

    @classmethod
    def of_rows(cls, inputs) -> Sampling:
        """What rows with these settings need, inputs [B] by their names in SETTINGS."""
        is_drawn = inputs["temperature"] > 0
        # As few programs as possible: a top_k is rounded up to a power of two, each row keeps to its own.
        top_k = int(max(inputs["top_k"] * is_drawn, default=0))
        return cls(
            bool(is_drawn.any()),
            1 << (top_k - 1).bit_length() if top_k else 0,
            bool((is_drawn & (inputs["top_p"] < 1)).any()),
            bool((is_drawn & (inputs["min_p"] > 0)).any()),
            bool((inputs["repetition_penalty"] != 1).any()),
        )

    @property
    def inputs(self) -> tuple[str, ...]:
        """The settings that are inputs of the graph."""
        used = {
            "temperature": self.is_drawn,
            "top_k": self.is_drawn and self.top_k > 0,
            "top_p": self.is_drawn and self.use_top_p,
            "min_p": self.is_drawn and self.use_min_p,
            "seed": self.is_drawn,
            "repetition_penalty": self.use_repetition_penalty,
        }
        return tuple(name for name in SETTINGS if used[name])

"""Settings of a generation: how tokens are chosen and when a row stops. Each may differ from row to row."""

from __future__ import annotations

import dataclasses
import math
import numbers
import secrets
from collections.abc import Iterable, Sequence

import numpy as np

from poptransformer.errors import UserError, near_miss
from poptransformer.models.decoder_model import MAX_STOP_IDS


@dataclasses.dataclass(frozen=True)
class GenerationSettings:
    """What one row wants.

    Attributes:
      max_new_tokens: the most new tokens; None for as many as fit into max_length.
      temperature: 0 takes the best token each time (greedy); None means 1 if top_k, top_p or min_p is set, else 0.
      top_k: number of best tokens to choose from; 0 for all. More than the vocabulary counts as all.
      top_p: share of the probability to choose from, in (0, 1].
      min_p: least probability of a token relative to the best one's, in [0, 1].
      repetition_penalty: above 1 makes tokens that the row already has less likely.
      seed: any whole number; the same seed gives the same tokens, also to several rows with the same prompt. None draws one
        for each row, which its Generation tells.
      ignore_eos: go on after an end-of-sequence token, for benchmarks.
      stop_token_ids: tokens that end the row, beside the model's own.
      stop: strings that end the row; they are not part of the text.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    def __post_init__(self):
        problems = list(self._problems())
        if problems:
            raise UserError("; ".join(problems))
        if self.temperature is None:
            chooses = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
            object.__setattr__(self, "temperature", 1.0 if chooses else 0.0)
        object.__setattr__(self, "seed", secrets.randbits(32) if self.seed is None else int(self.seed))

    def _problems(self):
        for name, wanted, fits in (
            ("max_new_tokens", "a whole number of at least 1", lambda x: x is None or (_is_whole(x) and x >= 1)),
            ("temperature", "a number of at least 0", lambda x: x is None or (_is_number(x) and x >= 0)),
            ("top_k", "a whole number of at least 0", lambda x: _is_whole(x) and x >= 0),
            ("top_p", "a number in (0, 1]", lambda x: _is_number(x) and 0 < x <= 1),
            ("min_p", "a number in [0, 1]", lambda x: _is_number(x) and 0 <= x <= 1),
            ("repetition_penalty", "a number above 0", lambda x: _is_number(x) and x > 0),
            ("seed", "a whole number", lambda x: x is None or _is_whole(x)),
            ("ignore_eos", "true or false", lambda x: isinstance(x, (bool, np.bool_))),
            ("stop_token_ids", "whole numbers of at least 0", lambda x: all(_is_whole(i) and i >= 0 for i in x)),
            ("stop", "strings that are not empty", lambda x: all(isinstance(s, str) and s for s in x)),
        ):
            value = getattr(self, name)
            if not fits(value):
                yield f"{name}={value!r}: wanted {wanted}"

    def seed_words(self) -> tuple[int, int]:
        """The seed as two 32-bit words, low one first."""
        return self.seed & 0xFFFFFFFF, (self.seed >> 32) & 0xFFFFFFFF


def settings_per_row(num_rows: int, **settings) -> list[GenerationSettings]:
    """Spread keyword settings over rows: a list gives each row its own value, anything else holds for all.

    `stop` and `stop_token_ids` are lists themselves: one list holds for all rows, a list of lists gives each row its own.

    Raises: UserError for an unknown name (with the near miss), a list of the wrong length, or values out of range.
    """
    names = [field.name for field in dataclasses.fields(GenerationSettings)]
    unknown = [name for name in settings if name not in names]
    if unknown:
        hints = ", ".join(f"{name!r}{near_miss(name, names)}" for name in unknown)
        raise UserError(f"unknown generation setting {hints}; settings: {', '.join(names)}")
    columns = {name: _column(name, value, num_rows) for name, value in settings.items()}
    rows = []
    for row in range(num_rows):
        try:
            rows.append(GenerationSettings(**{name: column[row] for name, column in columns.items()}))
        except UserError as error:
            raise UserError(f"prompt {row}: {error}" if num_rows > 1 else str(error)) from None
    return rows


def check_stop_ids(stop_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse stop ids outside the vocabulary and more of them than the device looks for."""
    outside = [i for i in stop_ids if i >= vocab_size]
    if outside:
        raise UserError(f"stop_token_ids: {outside[0]} is outside the vocabulary of {vocab_size}")
    if len(stop_ids) > MAX_STOP_IDS:
        raise UserError(f"stop_token_ids: {len(stop_ids)} with the model's own; at most {MAX_STOP_IDS} are supported")


def _column(name, value, num_rows):
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if name in ("stop", "stop_token_ids"):
        if isinstance(value, str) or not isinstance(value, Iterable):
            value = () if value is None else (value,)
        value = list(value)
        is_per_row = any(isinstance(item, (list, tuple, set)) or item is None for item in value)
        if not is_per_row:
            return [tuple(value)] * num_rows
        value = [() if item is None else (item,) if isinstance(item, (str, numbers.Integral)) else tuple(item)
                 for item in value]  # fmt: skip
    elif not isinstance(value, (list, tuple)):
        return [value] * num_rows
    if len(value) != num_rows:
        raise UserError(f"{name}: {len(value)} values for {num_rows} prompts; give one value, or one for each prompt")
    return [item.item() if isinstance(item, np.generic) else item for item in value]


def _is_whole(value):
    return isinstance(value, numbers.Integral) and not isinstance(value, (bool, np.bool_))


def _is_number(value):
    if not isinstance(value, numbers.Real) or isinstance(value, (bool, np.bool_)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond float's range
        return False

"""A measured case: what is called, and what it cannot be faster than."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Case:
    """One op at one size, in a program that calls it often enough, on enough different memory, that no cache helps.

    Attributes:
      name: op, format and size in words.
      kernel, plain: run the program with this project's kernel, or with the plain XLA lowering, and wait for it.
      num_calls: calls of the op in the program.
      num_bytes: that one call reads from memory.
      num_ops: multiplications and additions of one call; 0 where nobody would count them.
      peaks: kinds of `CpuLibrary.dot_peak_gop_per_s` with which the op could be computed; the fastest is the limit.
    """

    name: str
    kernel: Callable[[], None]
    plain: Callable[[], None]
    num_calls: int
    num_bytes: int
    num_ops: int = 0
    peaks: tuple[str, ...] = ("fp32",)

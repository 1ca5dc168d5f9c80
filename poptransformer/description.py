"""What a Session runs and how: device, precision, bytes, and for each compiled graph which lowering each op took."""

from __future__ import annotations

import collections
import dataclasses
import textwrap

from poptransformer.backends.engine import Choice, DeviceInfo

WIDTH = 128


@dataclasses.dataclass(frozen=True)
class Description:
    """What `Session.describe` gives; `str()` makes a readable text of it.

    Attributes:
      device: platform, device and kernels in use.
      precision: in words, as "int4".
      weight_bytes: of all weights on the device.
      weight_bytes_per_token: of those that one decode step reads.
      cache: what the states are, in words, as "KV cache float16".
      cache_bytes: of all states.
      graphs: name of each compiled graph -> how its ops are computed: a Choice and how many ops took it, kernels first.
    """

    device: DeviceInfo
    precision: str
    weight_bytes: int
    weight_bytes_per_token: int
    cache: str
    cache_bytes: int
    graphs: dict[str, tuple[tuple[Choice, int], ...]]

    def __str__(self):
        lines = [
            f"device      {self.device.platform}, {self.device.name}",
            f"custom ops  {self.device.custom_ops}",
            f"precision   {self.precision}",
            f"weights     {self.weight_bytes / 1e6:.1f} MB, {self.weight_bytes_per_token / 1e6:.1f} MB read per token",
            f"cache       {self.cache}, {self.cache_bytes / 1e6:.1f} MB",
        ]
        return "\n".join([*lines, *(f"\n{name}\n{lowering_table(counted)}" for name, counted in self.graphs.items())])


def count_choices(choices: list[Choice]) -> tuple[tuple[Choice, int], ...]:
    """Each Choice with how many ops took it: those with a kernel first, then the most frequent."""
    counted = collections.Counter(choices).items()
    return tuple(sorted(counted, key=lambda pair: (bool(pair[0].reason), -pair[1], pair[0].op)))


def lowering_table(counted) -> str:
    """A line (or more, if it is long) for each lowering: how many ops took it, and which.

    Args:
      counted: as `count_choices` gives it.
    """
    ops = collections.defaultdict(list)
    for choice, count in counted:
        ops[str(choice)].append((choice.op, count))
    width = max(map(len, ops), default=0)
    lines = []
    for lowering, pairs in ops.items():
        start = f"  {sum(count for _, count in pairs):5}  {lowering:<{width}}  "
        text = ", ".join(op if len(pairs) == 1 else f"{count} {op}" for op, count in pairs)
        lines += textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start))
    return "\n".join(lines)


def lowering_line(counted) -> str:
    """One line: how many ops of a graph run as kernels, by name, and how many otherwise."""
    lowerings = collections.Counter()
    for choice, count in counted:
        lowerings[choice.lowering] += count
    return ", ".join(f"{count} {lowering}" for lowering, count in lowerings.items())

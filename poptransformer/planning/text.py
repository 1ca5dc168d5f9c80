"""Numbers and tables as a plan prints them."""

from __future__ import annotations

from collections.abc import Sequence


def size(num_bytes: int) -> str:
    """Bytes in words, with three digits and decimal units: "3.12 GB"."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if num_bytes >= 0.9995 * unit:
            number = num_bytes / unit
            return f"{number:.{max(0, 2 - (number >= 9.995) - (number >= 99.95))}f} {name}"
    return f"{num_bytes} B"


def share(part: int, whole: int) -> str:
    """A part of a whole in per cent, rounded up, so that what does not fit never reads as 100 %."""
    return f"{-(-100 * part // whole)} %"


def aligned(rows: Sequence[Sequence[str]], num_left: int) -> list[str]:
    """Lines of a table: the first row is the head, the first num_left columns start at their left edge, the rest ends right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < num_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def ranges(first: int, count: int) -> str:
    """Whole numbers that follow each other: "3-5", "3", or "-" for none."""
    return "-" if count == 0 else str(first) if count == 1 else f"{first}-{first + count - 1}"

"""Progress on a terminal while weights are loaded and graphs compiled; silent when standard error is not a terminal."""

from __future__ import annotations

import contextlib
import sys


class Progress:
    """Shows what takes time. Everything goes to standard error, so that output can be piped."""

    @contextlib.contextmanager
    def loading(self, num_bytes: int):
        """A bar over the bytes of the weights. Gives a function to call with the bytes of each one loaded."""
        if not _is_terminal():
            yield lambda count: None
            return
        from tqdm import tqdm

        with tqdm(total=num_bytes, desc="loading weights", unit="B", unit_scale=True, leave=False) as bar:
            yield bar.update

    @contextlib.contextmanager
    def compiling(self, name: str):
        """A line while a graph is compiled."""
        if not _is_terminal():
            yield
            return
        sys.stderr.write(f"\rcompiling {name} ...")
        sys.stderr.flush()
        try:
            yield
        finally:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def _is_terminal():
    return sys.stderr is not None and sys.stderr.isatty()

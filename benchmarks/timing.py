"""Timing that a reader can trust: everything compared is measured in turn, in one run, after warm-up."""

import dataclasses
import statistics
import time


@dataclasses.dataclass(frozen=True)
class Samples:
    """Durations of one function, in seconds."""

    seconds: tuple

    @property
    def median(self):
        return statistics.median(self.seconds)

    @property
    def min(self):
        return min(self.seconds)

    @property
    def spread(self):
        """Half the distance between the quartiles over the median: 0.02 says that half of the samples lie within about 2 %."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median


def interleave(functions, rounds, warmup=2, settle_runs=0):
    """Time functions in turn, round after round, so that whatever slows the machine for a while slows all of them.

    Args:
      functions: name -> callable without arguments that returns when its work is done (for JAX: block_until_ready inside).
      rounds: how many times each is timed.
      warmup: how many times each runs before, untimed; compiling happens there.
      settle_runs: how many times each runs untimed before every timed run, so that what the function before it left behind
        (memory that is still being freed, a cold cache) is not charged to this one.
    Returns: name -> Samples.
    """
    for function in functions.values():
        for _ in range(warmup):
            function()
    seconds = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            for _ in range(settle_runs):
                function()
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    return {name: Samples(tuple(durations)) for name, durations in seconds.items()}

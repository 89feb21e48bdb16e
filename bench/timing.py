"""Device time of a launch, with the host's time kept out.

``rested``: a pause of 80 ms, then one launch at a time; the chip is cool and
clocks high. ``turns``: all implementations take turns in shuffled order
without rest, so that all of them see the same, power-capped clock.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["median_ratio", "rested", "turns"]

REST = 0.08  # seconds
SPIN_CYCLES = 1_000_000  # about half a millisecond: longer than the host needs to queue a call

_SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
}
"""


class _Clock:
    """Times one call by events behind a spinning kernel, so that the launch is already queued."""

    def __init__(self) -> None:
        import cupy
        import numpy

        self._cupy = cupy
        self._spin = cupy.RawKernel(_SPIN, "spin")
        self._cycles = numpy.int64(SPIN_CYCLES)
        self._start, self._end = cupy.cuda.Event(), cupy.cuda.Event()

    def __call__(self, function: Callable[[], Any]) -> float:
        self._spin((1,), (1,), (self._cycles,))
        self._start.record()
        function()
        self._end.record()
        self._end.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(self._start, self._end))


def rested(functions: Mapping[str, Callable[[], Any]], repeats: int = 12) -> dict[str, list[float]]:
    """Milliseconds of every function, each after a rest, one launch at a time."""
    clock = _Clock()
    times: dict[str, list[float]] = {}
    for name, function in functions.items():
        for _ in range(3):
            function()
        clock(function)
        time.sleep(REST)
        times[name] = [clock(function) for _ in range(repeats)]
    return times


def turns(
    functions: Mapping[str, Callable[[], Any]], rounds: int = 21, seed: int = 0
) -> dict[str, list[float]]:
    """Milliseconds of every function, round by round, in shuffled order without rest."""
    clock, order = _Clock(), random.Random(seed)
    names = list(functions)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        order.shuffle(names)
        for name in names:
            times[name].append(clock(functions[name]))
    return times


def median_ratio(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """Median of the rounds' ratios theirs / ours, and the low end of its 95 % interval.

    The interval is that of a median by order statistics (binomial).
    """
    ratios = sorted(b / a for a, b in zip(ours, theirs, strict=True))
    n = len(ratios)
    low = max(0, int(n / 2 - 0.98 * n**0.5))
    return statistics.median(ratios), ratios[low]

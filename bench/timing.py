"""Device time of a launch, with the host's time kept out.

``rested``: after a pause of 80 ms, an implementation runs one launch at a time;
the chip is cool and its clock is high. ``turns``: all implementations take turns
in shuffled order without rest, so that all have the same, power-capped clock.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Timer", "hidden", "interval", "median_ratio", "rested", "turns"]

REST = 0.08  # seconds
REPEATS = 12
FEWEST = 5  # repeats of a slow launch
ROUNDS = 21
LONG = 400.0  # milliseconds that the repeats of one function may take together
SPIN = 1.0  # milliseconds for which the chip is busy while the host queues a call
LONGEST_SPIN = 32.0

Timer = Callable[[str, Callable[[], Any]], float]

_SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
}
"""


class Clock:
    """Times one call by events after a spinning kernel, during which the host queues the call.

    If the host takes longer than the spin, the function is timed again after a longer spin, which
    its later calls keep.
    """

    def __init__(self) -> None:
        import cupy
        import numpy

        self._cupy, self._integer = cupy, numpy.int64
        self._kernel = cupy.RawKernel(_SPIN, "spin")
        self._kilohertz = cupy.cuda.Device().attributes.get("ClockRate", 2_000_000)
        self._start, self._end = cupy.cuda.Event(), cupy.cuda.Event()
        self._spins: dict[str, float] = {}

    def __call__(self, name: str, function: Callable[[], Any]) -> float:
        """Milliseconds of one call on the current stream."""
        milliseconds, self._spins[name] = hidden(
            lambda spin: self._once(spin, function), self._spins.get(name, SPIN)
        )
        return milliseconds

    def _once(self, spin: float, function: Callable[[], Any]) -> tuple[float, bool]:
        self._kernel((1,), (1,), (self._integer(spin * self._kilohertz),))
        self._start.record()
        function()
        self._end.record()
        late = bool(self._start.done)
        self._end.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(self._start, self._end)), late


def hidden(once: Callable[[float], tuple[float, bool]], spin: float) -> tuple[float, float]:
    """Milliseconds of a call after a spin that is long enough, and the length of that spin.

    ``once(spin)`` returns the time and whether the spin ended before everything was queued. For a
    call that waits for the device no spin is long enough; its time after the longest spin counts.
    """
    while True:
        milliseconds, late = once(spin)
        if not late or spin >= LONGEST_SPIN:
            return milliseconds, spin
        spin = min(2 * spin, LONGEST_SPIN)


def rested(
    functions: Mapping[str, Callable[[], Any]],
    repeats: int = REPEATS,
    clock: Timer | None = None,
) -> dict[str, list[float]]:
    """Milliseconds of every function, each after a rest, one launch at a time."""
    clock = clock or Clock()
    times: dict[str, list[float]] = {}
    for name, function in functions.items():
        for _ in range(2):
            function()
        once = clock(name, function)
        time.sleep(REST)
        count = min(repeats, max(FEWEST, int(LONG / max(once, 1e-3))))
        times[name] = [clock(name, function) for _ in range(count)]
    return times


def turns(
    functions: Mapping[str, Callable[[], Any]],
    rounds: int = ROUNDS,
    seed: int = 0,
    clock: Timer | None = None,
) -> dict[str, list[float]]:
    """Milliseconds of every function, round by round, in shuffled order without rest."""
    clock, order = clock or Clock(), random.Random(seed)
    names = list(functions)
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names:  # warms up, and finds the length of the spin
        clock(name, functions[name])
    for _ in range(rounds):
        order.shuffle(names)
        for name in names:
            times[name].append(clock(name, functions[name]))
    return times


def median_ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Median of the rounds' ratios theirs / ours, and its 95 % interval."""
    ratios = sorted(b / a for a, b in zip(ours, theirs, strict=False))
    below = interval(len(ratios))
    return statistics.median(ratios), ratios[below], ratios[-1 - below]


def interval(count: int) -> int:
    """The number of sorted values outside a median's 95 % interval on either side.

    By order statistics, it is the largest number for which the two tails of the binomial
    distribution with probability one half have at most 5 % together. It is 0 for fewer than 6
    values, for which no number satisfies that.
    """
    tail, below = 0.0, 0
    for outside in range(count // 2):
        tail += math.comb(count, outside) / 2.0**count
        if 2 * tail > 0.05:
            break
        below = outside
    return below

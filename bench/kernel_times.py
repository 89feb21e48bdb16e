"""The time for which a pass keeps the device busy, from JAX's profiler."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

__all__ = ["busy", "kernel_times"]

PASSES = 12
ROUNDS = 5
#: How the names begin of a profile's planes for devices, and of a plane's lines for streams. The
#: other lines of such a plane summarise the events of the streams.
DEVICE, STREAM = "/device:GPU", "Stream"


def kernel_times(
    passes: Mapping[str, Callable[[], Any]],
    wait: Callable[[Any], Any],
    rounds: int = ROUNDS,
    profiled: Callable[[Callable[[], Any]], Any] | None = None,
) -> dict[str, list[float]]:
    """Milliseconds of device time of every pass in each round; the passes take turns.

    Parameters
    ----------
    passes
        The passes, in another order each round.
    wait
        Takes the return value of one pass, or the list of those of several; returns when they are
        ready.
    profiled
        Runs a function and returns JAX's profile of it.
    """
    times: dict[str, list[float]] = {name: [] for name in passes}
    names, order = list(passes), random.Random(0)
    for each in passes.values():  # compiles
        wait(each())
    for _ in range(rounds):
        order.shuffle(names)
        for name in names:
            several = partial(_several, passes[name], wait)
            profile = (profiled or _profiled)(several)
            times[name].append(busy(profile) / PASSES)
    return times


def _several(each: Callable[[], Any], wait: Callable[[Any], Any]) -> None:
    wait([each() for _ in range(PASSES)])


def busy(profile: Any) -> float:
    """Milliseconds in which the device runs something.

    Raises
    ------
    RuntimeError
        If the profile holds no device work.
    """
    spans = [
        (event.start_ns, event.start_ns + event.duration_ns)
        for plane in profile.planes
        if plane.name.startswith(DEVICE)
        for line in plane.lines
        if line.name.startswith(STREAM)
        for event in line.events
    ]
    if not spans:
        seen = [(plane.name, [line.name for line in plane.lines]) for plane in profile.planes]
        raise RuntimeError(f"the profile holds no kernel; planes and their lines: {seen}")
    return _covered(spans) / 1e6


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """The total length of all spans; overlaps count once."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _profiled(function: Callable[[], Any]) -> Any:
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            function()
        (found,) = Path(folder).rglob("*.xplane.pb")
        return jax.profiler.ProfileData.from_file(str(found))

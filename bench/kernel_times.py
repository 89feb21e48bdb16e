"""How long the device is busy with a pass, by JAX's profiler."""

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
#: Planes of devices, and lines of streams in them; other lines sum up what these hold.
DEVICE, STREAM = "/device:GPU", "Stream"


def kernel_times(
    passes: Mapping[str, Callable[[], Any]],
    wait: Callable[[Any], Any],
    rounds: int = ROUNDS,
    profiled: Callable[[Callable[[], Any]], Any] | None = None,
) -> dict[str, list[float]]:
    """Milliseconds that the device computes for a pass, in each round, taking turns.

    Parameters
    ----------
    passes
        In each round in another order.
    wait
        Takes what the last pass returned, and returns when it is there.
    profiled
        Runs a function and gives JAX's profile of it.
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
    """Milliseconds in which something runs on the device.

    Raises
    ------
    RuntimeError
        If the profile holds nothing that ran there.
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
    """The length of all spans together, what several cover once."""
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

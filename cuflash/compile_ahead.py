"""Compiles the kernels of calls that are still to come, so that the first of them is quick."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from .calls_to_come import Calls, problems_of
from .cuda.available import device_count, require_device
from .cuda.compile import compile_kernel, require_toolchain
from .cuda.kernel_cache import binaries, require_kernel_cache
from .errors import ArgumentValueError, BackendUnavailableError, UnsupportedError
from .features.packed_group import with_packed_group
from .planning.decision import Plan
from .planning.device import DeviceLimits
from .planning.fa3 import fa3_plan
from .planning.fa3_choice import nearly_fastest
from .planning.kernel import KernelConfig
from .planning.plan import plan
from .planning.problem import AttentionProblem

__all__ = ["Outcome", "compile_ahead", "device_of", "kernels_of"]

#: How much longer than the shortest time that of a tile may be at a length and a number of heads
#: that stand for others, for one of these to take it.
_BETWEEN = 0.15

_ELSEWHERE = (
    "CuPy asks the current device for the architecture and loads there what it compiles, so its "
    "cache is filled by a device of the kind that will run the kernels. Run this on such a "
    "machine, and take the folder CUPY_CACHE_DIR along: it serves wherever CuPy, NVRTC and "
    "cuflash have the same versions and the same paths"
)


@dataclass(frozen=True)
class Outcome:
    """What compiling ahead has come to."""

    kernels: int
    compiled: int  # the others were in the cache already
    seconds: float
    folder: Path  # of the cache

    @property
    def found(self) -> int:
        """Kernels that were there already."""
        return self.kernels - self.compiled


def device_of(architecture: str | None = None) -> int:
    """The device that kernels are compiled for: the current one, or one of an architecture.

    Raises
    ------
    ArgumentValueError
        If ``architecture`` is no name of one.
    BackendUnavailableError
        If there is no device.
    UnsupportedError
        If none is of the architecture.
    """
    number = None if architecture is None else _number_of(architecture)
    try:
        current = require_device()
    except BackendUnavailableError as error:
        raise BackendUnavailableError(f"{error}. {_ELSEWHERE}") from error
    if number is None:
        return current
    devices = (current, *(i for i in range(device_count()) if i != current))
    there = {i: DeviceLimits.query(i).architecture for i in devices}
    for device, name in there.items():
        if name == f"sm_{number}":
            return device
    kinds = ", ".join(dict.fromkeys(there.values()))
    raise UnsupportedError(f"no device here is an sm_{number}, there is {kinds}. {_ELSEWHERE}")


def _number_of(architecture: str) -> str:
    found = re.fullmatch(r"(?:sm_)?(\d+)\.?(\d)a?", architecture)
    if found is None:
        raise ArgumentValueError("arch", repr(architecture), "one like sm_90")
    return found[1] + found[2]


def kernels_of(calls: Calls, limits: DeviceLimits) -> tuple[KernelConfig, ...]:
    """Every kernel that the plans of such calls ask for, each once.

    Raises
    ------
    ArgumentValueError
        If a width or a length is none that a call can have.
    UnsupportedError
        If some of the calls cannot be done on the device.
    """
    calls.check()
    found: dict[KernelConfig, None] = {}
    for problem in problems_of(calls):
        for chosen in _plans(problem, limits, calls):
            found |= dict.fromkeys(launch.config for launch in chosen.launches if launch.grid)
    return tuple(found)


def _plans(problem: AttentionProblem, limits: DeviceLimits, calls: Calls) -> Iterator[Plan]:
    """Of a problem, and of others that differ in nothing but their heads."""
    chosen = plan(problem, limits, algorithm=calls.algorithm)
    yield chosen
    if chosen.algorithm == "fa3" and problem.operation == "backward" and problem.group > 1:
        # How many heads there are decides whether blocks share kv tiles.
        for parts in (1, problem.group):
            yield fa3_plan(problem, limits, None, (), parts=parts)
    if chosen.algorithm == "fa3" and problem.operation == "forward" and calls.seqlens is None:
        # Heads and lengths, of which some stand for others, decide about tiles and chunks of few.
        for tile, chunk in nearly_fastest(with_packed_group(problem), limits, _BETWEEN):
            yield fa3_plan(problem, limits, None, (), tile=tile, kv_chunk=chunk)


def compile_ahead(
    kernels: Sequence[KernelConfig],
    device: int,
    told: Callable[[KernelConfig], None],
    threads: int | None = None,
) -> Outcome:
    """Compile kernels in parallel, into CuPy's cache.

    Whatever ends it early, the kernels under way are waited for, and no others
    are begun: CuPy's cache has what was done, whole.

    Parameters
    ----------
    kernels
        Each once.
    device
        Where they will run.
    told
        Called with each that is there, by the thread that calls this function.
    threads
        How many compile; by default one for each processor.

    Raises
    ------
    ArgumentValueError
        If the cache keeps nothing.
    ToolchainError, CompileError
        If the compiler is missing or refuses a kernel.
    """
    folder = require_kernel_cache()
    require_toolchain()
    before, start = binaries(folder), time.perf_counter()
    pool = ThreadPoolExecutor(threads or os.cpu_count())
    try:
        waiting = {pool.submit(compile_kernel, kernel, device): kernel for kernel in kernels}
        for done in as_completed(waiting):
            done.result()
            told(waiting[done])
    finally:
        pool.shutdown(cancel_futures=True)
    seconds = time.perf_counter() - start
    written = sum(before.get(name) != when for name, when in binaries(folder).items())
    # Another process may have filled the same cache meanwhile.
    return Outcome(len(kernels), min(written, len(kernels)), seconds, folder)

"""Compiles the kernels of future calls, so that the first call is fast."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from .calls_to_come import Calls, problems_of
from .cuda.available import device_count, require_device
from .cuda.compile import compile_kernel, require_toolchain
from .cuda.kernel_cache import binaries, require_kernel_cache
from .errors import ArgumentValueError, BackendUnavailableError, UnsupportedError
from .features.kv_chunks import NAME as KV_CHUNKS
from .features.packed_group import with_packed_group
from .planning.decision import Plan
from .planning.device import DeviceLimits
from .planning.fa2 import plans_of_few
from .planning.fa3 import fa3_plan
from .planning.fa3_choice import nearly_fastest
from .planning.kernel import KernelConfig
from .planning.parts_choice import kinds_of_parts
from .planning.plan import plan
from .planning.problem import AttentionProblem
from .planning.tiles.fa2_few import Fa2FewTile, few_tiles

__all__ = ["Outcome", "compile_ahead", "device_of", "kernels_of"]

#: A tile is compiled too if its predicted time exceeds the shortest by at most this fraction. The
#: prediction is for one length and number of heads, and another tile may be the fastest at others.
_BETWEEN = 0.15

_ELSEWHERE = (
    "CuPy compiles for the architecture of the current device and loads the kernels there, so its "
    "cache has to be filled on a device of the kind that will run them. Run this on such a "
    "machine, and copy the folder CUPY_CACHE_DIR: it works wherever CuPy, NVRTC and "
    "cuflash have the same versions and the same paths"
)


@dataclass(frozen=True)
class Outcome:
    """The result of compiling ahead."""

    kernels: int
    compiled: int  # the others were cached already
    seconds: float
    folder: Path  # of the cache

    @property
    def found(self) -> int:
        """The number of kernels that were cached already."""
        return self.kernels - self.compiled


def device_of(architecture: str | None = None) -> int:
    """The device that kernels are compiled for: the current one, or one of an architecture.

    Raises
    ------
    ArgumentValueError
        If ``architecture`` is not the name of one.
    BackendUnavailableError
        If there is no device.
    UnsupportedError
        If no device has the architecture.
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
    """Every kernel in the plans of such calls, each once.

    Raises
    ------
    ArgumentValueError
        If no call can have one of the widths or lengths.
    UnsupportedError
        If the device cannot do some of the calls.
    """
    calls.check()
    found: dict[KernelConfig, None] = {}
    kinds: set[object] = set()
    for problem in problems_of(calls):
        for chosen in _plans(problem, limits, calls):
            plans = [chosen]
            if isinstance(chosen.tile, Fa2FewTile):
                kind = _kind_of_few(problem, limits, chosen.launches[0].config)
                # The batch and the keys decide which way is the fastest.
                plans += () if kind in kinds else plans_of_few(problem, limits)
                kinds.add(kind)
            for one in plans:
                found |= dict.fromkeys(launch.config for launch in one.launches if launch.grid)
    return tuple(found)


def _kind_of_few(problem: AttentionProblem, limits: DeviceLimits, main: KernelConfig) -> object:
    """What the ways of a problem depend on, beside its batch, heads and lengths."""
    tiles = few_tiles(with_packed_group(problem), limits)
    features = tuple(one for one in main.features if one.name != KV_CHUNKS)
    alike = replace(main, constants=(), shared_bytes=0, output=problem.output, features=features)
    return alike, tuple(replace(tile, heads=min(tile.heads, 1)) for tile in tiles)


def _plans(problem: AttentionProblem, limits: DeviceLimits, calls: Calls) -> Iterator[Plan]:
    """The plan of a problem, and those of problems that differ only in their heads."""
    chosen = plan(problem, limits, algorithm=calls.algorithm)
    yield chosen
    if chosen.algorithm == "fa3" and problem.operation == "backward":
        # The number of heads decides whether blocks share kv tiles.
        for parts in kinds_of_parts(problem):
            yield fa3_plan(problem, limits, None, (), parts=parts)
    if chosen.algorithm == "fa3" and problem.operation == "forward" and calls.seqlens is None:
        # For few rows the tile and the chunk depend on the number of heads and on the lengths. This
        # problem stands for calls with others, so the choices that are nearly as fast as the
        # fastest are compiled too.
        for tile, chunk in nearly_fastest(with_packed_group(problem), limits, _BETWEEN):
            yield fa3_plan(problem, limits, None, (), tile=tile, kv_chunk=chunk)


def compile_ahead(
    kernels: Sequence[KernelConfig],
    device: int,
    told: Callable[[KernelConfig], None],
    threads: int | None = None,
) -> Outcome:
    """Compile kernels in parallel, into CuPy's cache.

    If an error ends it early, it waits for the kernels being compiled and starts no others: every
    kernel in CuPy's cache is complete.

    Parameters
    ----------
    kernels
        The kernels, each once.
    device
        The device that will run them.
    told
        Called with each finished kernel, in the thread that calls this function.
    threads
        The number of compiling threads; by default one for each processor.

    Raises
    ------
    ArgumentValueError
        If the cache is off.
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
    # Another process may have filled the same cache at the same time.
    return Outcome(len(kernels), min(written, len(kernels)), seconds, folder)

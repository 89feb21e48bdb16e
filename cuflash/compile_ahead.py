"""Compiles the kernels of calls that are still to come, so that the first of them is quick."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from .cuda.available import device_count, require_device
from .cuda.compile import compile_kernel, require_toolchain
from .cuda.kernel_cache import binaries, require_kernel_cache
from .errors import ArgumentValueError, BackendUnavailableError, UnsupportedError
from .features.table import with_features
from .features.use import Operand
from .options import AlgorithmChoice
from .planning.decision import Plan
from .planning.device import DeviceLimits
from .planning.fa3 import fa3_plan
from .planning.kernel import KernelConfig
from .planning.plan import plan
from .planning.problem import (
    DTYPES,
    MAX_HEAD_DIM,
    MAX_SEQLEN,
    AttentionProblem,
    DTypeName,
    MaskKind,
    Operation,
)
from .planning.tiles import fa2_tables, fa3_tables
from .tensors import QKV, dtypes_of, tensors

__all__ = ["Calls", "Outcome", "compile_ahead", "device_of", "kernels_of"]

#: (q or k, v), or (queries, keys).
Pair = tuple[int, int]

#: Heads of all batch entries. With few of them plans take smaller tiles.
_HEADS = tuple(4**i for i in range(7))
#: Beyond the last length there is no other tile.
_LENGTHS = tuple(2**i for i in range(4, 18))

_ELSEWHERE = (
    "CuPy asks the current device for the architecture and loads there what it compiles, so its "
    "cache is filled by a device of the kind that will run the kernels. Run this on such a "
    "machine, and take the folder CUPY_CACHE_DIR along: it serves wherever CuPy, NVRTC and "
    "cuflash have the same versions and the same paths"
)


@dataclass(frozen=True)
class Calls:
    """Calls to come: all combinations of these.

    Attributes
    ----------
    head_dims
        Widths of q and k, and of v.
    dtypes, operations, algorithm, deterministic
        As the calls will have them.
    masks
        "causal", "full", or those of windows: "left" bounds the keys of a
        query on the left alone, "band" on both sides.
    softcap
        Whether scores are capped; by how much is no part of a kernel.
    sinks
        Dtypes of sinks: None for calls without any, "query" for the dtype of
        q. Gradients of calls with sinks are also those of the sinks.
    unaligned
        Rows begin at no multiples of 16 bytes. They do anyway where a row is
        not a multiple of 16 bytes itself.
    seqlens
        Lengths of q and of k; None for all that make a difference.
    """

    head_dims: tuple[Pair, ...]
    dtypes: tuple[DTypeName, ...]
    operations: tuple[Operation, ...] = ("forward", "backward")
    masks: tuple[MaskKind, ...] = ("full", "causal")
    softcap: tuple[bool, ...] = (False,)
    sinks: tuple[str | None, ...] = (None,)
    algorithm: AlgorithmChoice = "auto"
    deterministic: bool = False
    unaligned: bool = False
    seqlens: tuple[Pair, ...] | None = None

    def check(self) -> None:
        """Raise ArgumentValueError for widths and lengths that no call has."""
        limits = (("head_dim", self.head_dims, MAX_HEAD_DIM), ("seqlen", self.seqlens, MAX_SEQLEN))
        for name, pairs, most in limits:
            for value in (value for pair in pairs or () for value in pair):
                if not 1 <= value <= most:
                    raise ArgumentValueError(name, str(value), f"1 to {most}")


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
    for problem in _problems(calls):
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


def _problems(calls: Calls) -> Iterator[AttentionProblem]:
    seqlens = _telling_lengths() if calls.seqlens is None else calls.seqlens
    features = product(calls.softcap, calls.sinks)
    for dims, dtype, operation, mask, (softcap, sinks) in product(
        calls.head_dims, calls.dtypes, calls.operations, calls.masks, features
    ):
        rows = [dim * DTYPES[dtype].itemsize for dim in dims]
        aligned = not calls.unaligned and all(row % 16 == 0 for row in rows)
        groups = (1, 64) if operation == "backward" else (1,)
        windows = _telling_windows(operation) if mask in ("left", "band") else (0,)
        for (seqlen_q, seqlen_kv), heads, group, window in product(
            seqlens, _HEADS, groups, windows
        ):
            plain = AttentionProblem(
                operation=operation,
                batch=1,
                heads_q=heads * group,
                heads_kv=heads,
                seqlen_q=seqlen_q,
                seqlen_kv=seqlen_kv,
                head_dim=dims[0],
                head_dim_v=dims[1],
                storage=dtype,
                output=dtype,
                mask=mask,
                scale=1.0 / math.sqrt(dims[0]),
                q_offset=seqlen_kv - seqlen_q if mask in ("causal", "band") else 0,
                q_first=seqlen_kv - window - (seqlen_q - 1 if mask == "band" else 0)
                if window
                else 0,
                alignment="tensor_map" if aligned else "element",
                deterministic=calls.deterministic,
            )
            yield _featured(plain, softcap, sinks)


def _telling_windows(operation: Operation) -> tuple[int, ...]:
    """Numbers of keys in a window: both sides of every one at which a pass's table changes."""
    if operation == "forward":
        last_of_rows = {row.widest_window for row in fa3_tables.FORWARD if row.widest_window}
    else:
        first_of_rows = {row.fewest_of_window for row in fa3_tables.BACKWARD}
        last_of_rows = {first - 1 for first in first_of_rows if first}
    return tuple(keys for last in sorted(last_of_rows) for keys in (last, last + 1))


def _featured(problem: AttentionProblem, softcap: bool, sinks: str | None) -> AttentionProblem:
    """The problem with its features: that of its mask, a cap of any size, and sinks of a dtype."""
    keywords = {"softcap": 1.0} if softcap else {}
    if sinks is None:
        return with_features(problem, keywords, {})
    dtype = problem.storage if sinks == "query" else sinks
    allowed = dtypes_of(tensors()["sinks"], problem, {})
    if dtype not in allowed:
        raise ArgumentValueError("sinks", f"{dtype} for {problem.storage}", " or ".join(allowed))
    operand = Operand("sinks", dtype, (problem.heads_q,))
    if problem.operation == "backward":
        problem = replace(problem, wrt=(*QKV, "sinks"))
    return with_features(problem, keywords, {"sinks": operand})


def _telling_lengths() -> tuple[Pair, ...]:
    """Lengths of which every tile that a plan can take is taken by one.

    Both sides of every length at which the tables change, and among them
    enough for the plans that weigh lengths against heads; as many queries as
    keys, or one as in decoding.
    """
    shorter = [n for row in fa3_tables.FORWARD for n in (row.longest, row.longest_causal)]
    longer = [row.shortest - 1 for rows in fa2_tables.FORWARD.values() for row in rows]
    edges = [n for last in (*shorter, *longer) for n in (last, last + 1)]
    lengths = {*_LENGTHS, *(n for n in edges if 1 <= n <= MAX_SEQLEN)}
    return tuple((queries, keys) for keys in sorted(lengths) for queries in (keys, 1))


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

"""Chooses the algorithm of a problem; the plan of that algorithm chooses the tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ..errors import ArgumentValueError, UnsupportedError
from ..features.refused import check_refused
from .decision import ALGORITHMS, Algorithm, Backend, Plan
from .device import DeviceLimits, HostLimits
from .fa1 import fa1_plan
from .fa2 import fa2_plan, takes_few
from .fa3 import fa3_plan
from .key_chunks import check_chunk, require_one
from .problem import AttentionProblem
from .tiles import host

__all__ = ["ALGORITHMS", "Algorithm", "Backend", "Plan", "plan"]

#: Oldest device: it has ldmatrix and the m16n8k8 matrix instruction.
OLDEST_DEVICE = (7, 5)


def plan(
    problem: AttentionProblem,
    limits: DeviceLimits | HostLimits,
    *,
    algorithm: Algorithm | Literal["auto"] = "auto",
    blocks: tuple[int, int] | None = None,
    kv_chunk: int | None = None,
) -> Plan:
    """Choose the algorithm and the tile of a problem. Pure: queries and compiles nothing.

    Parameters
    ----------
    problem
        The problem.
    limits
        Limits of the CUDA device, or of the CPU for the tiled NumPy code.
    algorithm
        "auto" takes the first of :data:`ALGORITHMS` that can do the problem.
    blocks
        ``(block_q, block_kv)`` instead of the chosen ones.
    kv_chunk
        Keys that one thread block of a forward pass processes; another block
        processes the next chunk. 0: one processes all; None: the plan chooses.

    Raises
    ------
    UnsupportedError
        If the named algorithm, or with "auto" every one, cannot do the
        problem on this device.
    ArgumentValueError
        If ``blocks`` does not fit, naming what it needs and the nearest that does,
        or ``kv_chunk`` does not consist of whole tiles.
    """
    if kv_chunk is not None and problem.operation == "backward":
        raise ArgumentValueError("kv_chunk", str(kv_chunk), "None: chunks are of the forward pass")
    if isinstance(limits, HostLimits):
        return _host_plan(problem, limits, algorithm, blocks, kv_chunk)
    if algorithm != "auto":
        return _cuda_plan(problem, limits, algorithm, blocks, (), kv_chunk)
    rejected: list[tuple[Algorithm, str]] = []
    order = ALGORITHMS
    if takes_few(problem, limits, blocks, kv_chunk):
        rejected.append(("fa3", "fa3 is for more queries: fa2 reads the keys of few faster"))
        order = ("fa2", "fa3", "fa1")
    for candidate in order:
        try:
            return _cuda_plan(problem, limits, candidate, blocks, tuple(rejected), kv_chunk)
        except UnsupportedError as error:
            rejected.append((candidate, str(error)))
        except ArgumentValueError as error:  # it has no tile of these blocks
            if candidate != "fa3":  # fa3 has few tiles; the others have many
                raise
            rejected.append((candidate, str(error)))
    raise UnsupportedError("; ".join(reason for _, reason in rejected))


def _host_plan(
    problem: AttentionProblem,
    limits: HostLimits,
    algorithm: Algorithm | Literal["auto"],
    blocks: tuple[int, int] | None,
    kv_chunk: int | None,
) -> Plan:
    if kv_chunk:
        raise UnsupportedError("the NumPy backend walks all keys of a row: it has no kv_chunk")
    if algorithm == "fa3":
        raise UnsupportedError("fa3 is for Hopper GPUs; the NumPy backend has fa1 and fa2")
    for use in problem.uses:
        if use.needs_cuda:
            lacks = f"needs {use.host_needs}" if use.host_needs else f"does not have {use.feature}"
            raise UnsupportedError(f"the NumPy backend {lacks}")
    if blocks is None:
        tile = host.tile_of_cache(problem, limits)
        reason = f"blocks for {limits.cache:,} bytes of cache"
    else:
        tile = host.tile_of_blocks(problem, limits, blocks)
        reason = "blocks as asked"
    if tile.threads > 1:
        reason += f", {tile.threads} threads"
    chosen: Algorithm = "fa2" if algorithm == "auto" else algorithm
    check_refused((*problem.features, chosen, "numpy"))
    return Plan(problem, "numpy", chosen, tile, reason)


def _cuda_plan(
    problem: AttentionProblem,
    limits: DeviceLimits,
    algorithm: Algorithm,
    blocks: tuple[int, int] | None,
    rejected: tuple[tuple[Algorithm, str], ...],
    kv_chunk: int | None,
) -> Plan:
    if algorithm not in _CUDA_FAMILIES:
        raise UnsupportedError(f"{algorithm} has no CUDA kernels in this version")
    check_refused((*problem.features, algorithm, "cuda"))
    _check_float8(problem, limits, algorithm, blocks, kv_chunk)
    _check_device(problem, limits, algorithm)
    if kv_chunk is not None:
        check_chunk(problem, algorithm, kv_chunk)
        return _CUDA_FAMILIES[algorithm](problem, limits, blocks, rejected, kv_chunk=kv_chunk)
    return _CUDA_FAMILIES[algorithm](problem, limits, blocks, rejected)


def _check_float8(
    problem: AttentionProblem,
    limits: DeviceLimits,
    algorithm: Algorithm,
    blocks: tuple[int, int] | None,
    kv_chunk: int | None,
) -> None:
    """Refuse float8 caches where no kernel reads them, or not in such chunks."""
    if not problem.float8 or algorithm == "fa3":
        return
    if algorithm != "fa2" or not takes_few(problem, limits, blocks, None):
        raise UnsupportedError(
            f"{algorithm} does not read float8 caches (k_scale and v_scale) here: fa3 does, on "
            "Hopper GPUs, and fa2 for few queries, from compute capability 8.9 on"
        )
    if not takes_few(problem, limits, blocks, kv_chunk):
        require_one((), kv_chunk)


def _check_device(problem: AttentionProblem, limits: DeviceLimits, algorithm: str) -> None:
    capability = "{}.{}".format(*limits.compute_capability)
    if limits.compute_capability < OLDEST_DEVICE:
        raise UnsupportedError(
            f"{algorithm} needs compute capability 7.5; this device has {capability}"
        )
    if problem.storage == "bfloat16" and limits.compute_capability < (8, 0):
        raise UnsupportedError(
            f"{algorithm} in bfloat16 needs the bfloat16 matrix instructions of compute "
            f"capability 8.0; this device has {capability}: use float16 or float32"
        )


_CUDA_FAMILIES: dict[str, Callable[..., Plan]] = {
    "fa1": fa1_plan,
    "fa2": fa2_plan,
    "fa3": fa3_plan,
}

"""Decides what runs: the only place where an algorithm and its tile are chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from ..errors import ArgumentValueError, UnsupportedError
from .device import DeviceLimits, HostLimits
from .kernel import Buffer, CopyKind, KernelConfig, KernelLaunch, lay_out
from .problem import DTYPES, AttentionProblem
from .tiles import fa1, host, steps
from .tiles.common import Footprint, bucket

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Backend",
    "Plan",
    "plan",
]

Algorithm = Literal["fa1", "fa2", "fa3"]
Backend = Literal["cuda", "numpy"]

#: What ``algorithm="auto"`` tries, best first.
ALGORITHMS: tuple[Algorithm, ...] = ("fa3", "fa2", "fa1")

#: Oldest device: it has ldmatrix and the m16n8k8 matrix instruction.
OLDEST_DEVICE = (7, 5)


@dataclass(frozen=True)
class Plan:
    """What one call runs."""

    problem: AttentionProblem
    backend: Backend
    algorithm: Algorithm
    tile: fa1.Fa1Tile | host.HostTile
    reason: str
    rejected: tuple[tuple[Algorithm, str], ...] = ()  # better ones, and why not
    launches: tuple[KernelLaunch, ...] = ()
    workspace: tuple[Buffer, ...] = ()

    @property
    def workspace_bytes(self) -> int:
        """Size of the workspace; every buffer in it starts at a multiple of 256."""
        return max((b.offset + b.nbytes for b in self.workspace), default=0)

    def __str__(self) -> str:
        tile = self.tile
        return (
            f"{self.problem}: {self.algorithm} on {self.backend}, "
            f"tile {tile.block_q}x{tile.block_kv}"
        )


def plan(
    problem: AttentionProblem,
    limits: DeviceLimits | HostLimits,
    *,
    algorithm: Algorithm | Literal["auto"] = "auto",
    blocks: tuple[int, int] | None = None,
) -> Plan:
    """Choose the algorithm and the tile of a problem. Pure: queries and compiles nothing.

    Parameters
    ----------
    problem
        What is computed.
    limits
        Of the CUDA device, or of the CPU for the tiled NumPy code.
    algorithm
        "auto" takes the first of :data:`ALGORITHMS` that can do the problem.
    blocks
        ``(block_q, block_kv)`` instead of the chosen ones.

    Raises
    ------
    UnsupportedError
        If the named algorithm, or with "auto" every one, cannot do the
        problem on this device.
    ArgumentValueError
        If ``blocks`` does not fit, naming what it needs and the nearest that does.
    """
    if isinstance(limits, HostLimits):
        return _host_plan(problem, limits, algorithm, blocks)
    if algorithm != "auto":
        return _cuda_plan(problem, limits, algorithm, blocks, ())
    rejected: list[tuple[Algorithm, str]] = []
    for candidate in ALGORITHMS:
        try:
            return _cuda_plan(problem, limits, candidate, blocks, tuple(rejected))
        except UnsupportedError as error:
            rejected.append((candidate, str(error)))
    raise UnsupportedError("; ".join(reason for _, reason in rejected))


def _host_plan(
    problem: AttentionProblem,
    limits: HostLimits,
    algorithm: Algorithm | Literal["auto"],
    blocks: tuple[int, int] | None,
) -> Plan:
    if algorithm == "fa3":
        raise UnsupportedError(
            "fa3 is for Hopper GPUs, and not in this version; the NumPy backend has fa1 and fa2"
        )
    if blocks is None:
        tile = host.tile_of_cache(problem, limits)
        reason = f"blocks for {limits.cache:,} bytes of cache"
    else:
        tile = host.tile_of_blocks(problem, limits, blocks)
        reason = "blocks as asked"
    chosen: Algorithm = "fa2" if algorithm == "auto" else algorithm
    return Plan(problem, "numpy", chosen, tile, reason)


def _cuda_plan(
    problem: AttentionProblem,
    limits: DeviceLimits,
    algorithm: Algorithm,
    blocks: tuple[int, int] | None,
    rejected: tuple[tuple[Algorithm, str], ...],
) -> Plan:
    if algorithm not in _CUDA_FAMILIES:
        raise UnsupportedError(f"{algorithm} has no CUDA kernels in this version")
    _check_device(problem, limits, algorithm)
    return _CUDA_FAMILIES[algorithm](problem, limits, blocks, rejected)


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


def _fa1_plan(
    problem: AttentionProblem,
    limits: DeviceLimits,
    blocks: tuple[int, int] | None,
    rejected: tuple[tuple[Algorithm, str], ...],
) -> Plan:
    tile, reason = _fa1_tile(problem, limits, blocks)
    config = _kernel_config(
        problem, limits, "fa1", problem.operation, tile.constants(), tile.footprint
    )
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    itemsize = DTYPES[problem.compute].itemsize
    if problem.operation == "forward":
        launches = [KernelLaunch(config, problem.batch * problem.heads_q)]
        sizes = [
            ("out_accumulator", rows * tile.head_dim_v * itemsize),
            ("row_max", rows * itemsize),
            ("row_sum", rows * itemsize),
        ]
    else:
        launches = [
            _delta_launch(problem, limits),
            KernelLaunch(config, problem.batch * problem.heads_kv),
        ]
        sizes = [
            ("delta", rows * itemsize),
            ("dq_accumulator", rows * tile.head_dim * itemsize),
        ]
    return Plan(
        problem, "cuda", "fa1", tile, reason, rejected, tuple(launches), tuple(lay_out(sizes))
    )


_CUDA_FAMILIES: dict[str, Callable[..., Plan]] = {"fa1": _fa1_plan}


def _fa1_tile(
    problem: AttentionProblem, limits: DeviceLimits, blocks: tuple[int, int] | None
) -> tuple[fa1.Fa1Tile, str]:
    rule = fa1.paper_blocks(problem, limits)
    said = f"B_c = ceil(M / 4d) asks for {rule[0]}x{rule[1]}"
    if blocks is not None:
        return _asked_tile(problem, limits, blocks), f"blocks as asked; {said}"
    for tile in fa1.tiles_of_rule(problem, limits):
        if tile.footprint.excess(limits) is None:
            exact = (tile.block_q, tile.block_kv) == rule
            return tile, said if exact else f"{said}; the nearest that fits is taken"
    raise _nothing_fits(problem, limits)


def _nothing_fits(problem: AttentionProblem, limits: DeviceLimits) -> UnsupportedError:
    *_, smallest = fa1.tiles_of_rule(problem, limits)
    return UnsupportedError(
        f"fa1 {problem.operation} in {problem.storage} at head_dim "
        f"{problem.head_dim}/{problem.head_dim_v}: the smallest tile "
        f"{smallest.block_q}x{smallest.block_kv} needs {smallest.footprint.excess(limits)}"
    )


def _asked_tile(
    problem: AttentionProblem, limits: DeviceLimits, blocks: tuple[int, int]
) -> fa1.Fa1Tile:
    tiles = list(fa1.tiles_of_blocks(problem, *blocks))
    for tile in tiles:
        if tile.footprint.excess(limits) is None:
            return tile
    nearest = _nearest_blocks(problem, limits, blocks)
    if not tiles:
        raise ArgumentValueError(
            "blocks", str(blocks), f"multiples of {fa1.steps_of(problem)}, the nearest {nearest}"
        )
    excess = min(tiles, key=lambda t: t.footprint.pressure(limits)).footprint.excess(limits)
    raise ArgumentValueError(
        "blocks", f"{blocks}, which needs {excess}", f"blocks that fit, the nearest {nearest}"
    )


def _nearest_blocks(
    problem: AttentionProblem, limits: DeviceLimits, blocks: tuple[int, int]
) -> tuple[int, int]:
    fitting = {
        (tile.block_q, tile.block_kv)
        for tile in fa1.all_tiles(problem)
        if tile.footprint.excess(limits) is None
    }
    if not fitting:
        raise _nothing_fits(problem, limits)
    return min(fitting, key=lambda b: (abs(b[0] - blocks[0]) + abs(b[1] - blocks[1]), b))


def _delta_launch(problem: AttentionProblem, limits: DeviceLimits) -> KernelLaunch:
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    tile = steps.delta_tile(rows, limits)
    config = _kernel_config(problem, limits, "steps", "delta", tile.constants(), tile.footprint)
    # Nothing else changes its code, so every head_dim and mask shares one compilation.
    shared = replace(config, mask="full", copies="element", head_dim=0, head_dim_v=0)
    shared = replace(shared, products="scalar", mma_depth=0)
    return KernelLaunch(shared, tile.grid)


def _kernel_config(
    problem: AttentionProblem,
    limits: DeviceLimits,
    generation: str,
    kernel: str,
    constants: dict[str, int],
    footprint: Footprint,
) -> KernelConfig:
    ampere = limits.compute_capability >= (8, 0)
    fast: CopyKind = "asynchronous" if ampere else "vector"
    half = DTYPES[problem.storage].itemsize == 2
    return KernelConfig(
        architecture=limits.architecture,
        generation=generation,
        kernel=kernel,
        storage=problem.storage,
        compute=problem.compute,
        output=problem.output,
        statistics=problem.statistics,
        head_dim=bucket(problem.head_dim),
        head_dim_v=bucket(problem.head_dim_v),
        mask=problem.mask,
        copies=fast if problem.alignment == "vector" else "element",
        workspace_copies=fast,
        products="tensor_cores" if half else "scalar",
        mma_depth=(16 if ampere else 8) if half else 0,
        constants=tuple(constants.items()),
        threads=footprint.threads,
        shared_bytes=footprint.shared_bytes,
        features=problem.features,
    )

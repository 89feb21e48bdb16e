"""The plan of FlashAttention-1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..errors import UnsupportedError
from .argument_gradients import ArgumentGradients
from .decision import Algorithm, Plan, asked_tile, nothing_fits
from .device import DeviceLimits
from .item_lists import ItemLists
from .kernel import KernelConfig, KernelLaunch, kernel_config, lay_out
from .problem import DTYPES, AttentionProblem
from .tiles import fa1, steps
from .tiles.common import Arithmetic

__all__ = ["fa1_plan"]


def fa1_plan(
    problem: AttentionProblem,
    limits: DeviceLimits,
    blocks: tuple[int, int] | None,
    rejected: tuple[tuple[Algorithm, str], ...],
    kv_chunk: int = 0,
) -> Plan:
    """Return a plan of one thread block for each head, with accumulators in the workspace."""
    if "cached_keys" in problem.features:
        raise UnsupportedError(
            "fa1 does not take page_table, cache_batch_idx, cache_leftpad or cu_seqlens_q "
            "with caches"
        )
    tile, reason = _tile(problem, limits, blocks)
    arithmetic = fa1.arithmetic(problem.storage, limits.compute_capability, tile.fragment_rows)
    begins = ItemLists(problem, limits, arithmetic, None)
    one = problem, limits, tile, arithmetic
    launches, sizes = _forward(*one) if problem.operation == "forward" else _backward(*one)
    return Plan(
        problem,
        "cuda",
        "fa1",
        tile,
        reason,
        rejected,
        (*begins.before, *launches),
        tuple(lay_out([*sizes, *begins.sizes])),
    )


#: Launches, and buffers of the workspace with their bytes.
_Parts = tuple[list[KernelLaunch], list[tuple[str, int]]]


def _forward(
    problem: AttentionProblem, limits: DeviceLimits, tile: fa1.Fa1Tile, arithmetic: Arithmetic
) -> _Parts:
    numbers = _rows(problem) * DTYPES[problem.compute].itemsize
    sizes = [
        ("out_accumulator", numbers * tile.head_dim_v),
        ("row_max", numbers),
        ("row_sum", numbers),
    ]
    config = _config(problem, limits, tile, arithmetic)
    return [KernelLaunch(config, problem.batches * problem.heads_q)], sizes


def _backward(
    problem: AttentionProblem, limits: DeviceLimits, tile: fa1.Fa1Tile, arithmetic: Arithmetic
) -> _Parts:
    numbers = _rows(problem) * DTYPES[problem.compute].itemsize
    config = _config(problem, limits, tile, arithmetic)
    others = ArgumentGradients(
        problem, limits, arithmetic, problem.seqlen_q, config.threads, tile.block_kv
    )
    main = KernelLaunch(config, problem.batches * problem.heads_kv)
    sizes = [("delta", numbers), ("dq_accumulator", numbers * tile.head_dim), *others.sizes]
    return [_delta_launch(problem, limits), main, *others.after], sizes


def _rows(problem: AttentionProblem) -> int:
    """Return the number of queries of all heads."""
    return problem.batch * problem.heads_q * problem.seqlen_q


def _config(
    problem: AttentionProblem, limits: DeviceLimits, tile: fa1.Fa1Tile, arithmetic: Arithmetic
) -> KernelConfig:
    """Return the configuration of the main kernel."""
    kernel = ("fa1", problem.operation)
    return kernel_config(problem, limits, kernel, arithmetic, tile.constants(), tile.footprint)


def _tile(
    problem: AttentionProblem, limits: DeviceLimits, blocks: tuple[int, int] | None
) -> tuple[fa1.Fa1Tile, str]:
    rule = fa1.paper_blocks(problem, limits)
    said = f"B_c = ceil(M / 4d) asks for {rule[0]}x{rule[1]}"
    if blocks is not None:
        needed = f"multiples of {fa1.steps_of(problem)}"
        ways = fa1.tiles_of_blocks(problem, *blocks)
        tile = asked_tile(
            problem, "fa1", blocks, limits, needed, ways, lambda: fa1.all_tiles(problem)
        )
        return tile, f"blocks as asked; {said}"
    for tile in _fitting(problem, limits) if problem.block[0] else ():
        if problem.block[0] % tile.block_q == 0 and problem.block[1] % tile.block_kv == 0:
            return tile, f"{said}; the nearest that divides the blocks of block_mask is taken"
    for tile in _fitting(problem, limits):
        exact = (tile.block_q, tile.block_kv) == rule
        return tile, said if exact else f"{said}; the nearest that fits is taken"
    *_, smallest = fa1.tiles_of_rule(problem, limits)
    raise nothing_fits(problem, limits, "fa1", smallest)


def _fitting(problem: AttentionProblem, limits: DeviceLimits) -> Iterator[fa1.Fa1Tile]:
    """Yield the tiles of the rule that fit, lazily: only the first of hundreds is used."""
    tiles = fa1.tiles_of_rule(problem, limits)
    return (tile for tile in tiles if tile.footprint.excess(limits) is None)


def _delta_launch(problem: AttentionProblem, limits: DeviceLimits) -> KernelLaunch:
    tile = steps.delta_tile(_rows(problem), limits)
    arithmetic = fa1.arithmetic(problem.storage, limits.compute_capability, 8)
    kernel = ("steps", "delta")
    config = kernel_config(problem, limits, kernel, arithmetic, tile.constants(), tile.footprint)
    # The code does not depend on head_dim or mask, so all of them share one compilation.
    shared = replace(config, mask="full", copies="element", head_dim=0, head_dim_v=0)
    shared = replace(shared, products="scalar", mma_depth=0)
    return KernelLaunch(shared, tile.grid)

"""The plan of FlashAttention-1."""

from __future__ import annotations

from dataclasses import replace

from .argument_gradients import ArgumentGradients
from .decision import Algorithm, Plan, asked_tile, nothing_fits
from .device import DeviceLimits
from .item_lists import ItemLists
from .kernel import KernelLaunch, kernel_config, lay_out
from .problem import DTYPES, AttentionProblem
from .tiles import fa1, steps

__all__ = ["fa1_plan"]


def fa1_plan(
    problem: AttentionProblem,
    limits: DeviceLimits,
    blocks: tuple[int, int] | None,
    rejected: tuple[tuple[Algorithm, str], ...],
) -> Plan:
    """One thread block for each head; the accumulators in the workspace."""
    tile, reason = _tile(problem, limits, blocks)
    arithmetic = fa1.arithmetic(problem.storage, limits.compute_capability, tile.fragment_rows)
    kernel = ("fa1", problem.operation)
    config = kernel_config(problem, limits, kernel, arithmetic, tile.constants(), tile.footprint)
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    itemsize = DTYPES[problem.compute].itemsize
    begins = ItemLists(problem, limits, arithmetic, None)
    if problem.operation == "forward":
        launches = [*begins.before, KernelLaunch(config, problem.batches * problem.heads_q)]
        sizes = [
            ("out_accumulator", rows * tile.head_dim_v * itemsize),
            ("row_max", rows * itemsize),
            ("row_sum", rows * itemsize),
        ]
    else:
        others = ArgumentGradients(
            problem, limits, arithmetic, problem.seqlen_q, config.threads, tile.block_kv
        )
        launches = [
            *begins.before,
            _delta_launch(problem, limits),
            KernelLaunch(config, problem.batches * problem.heads_kv),
            *others.after,
        ]
        sizes = [
            ("delta", rows * itemsize),
            ("dq_accumulator", rows * tile.head_dim * itemsize),
            *others.sizes,
        ]
    return Plan(
        problem,
        "cuda",
        "fa1",
        tile,
        reason,
        rejected,
        tuple(launches),
        tuple(lay_out([*sizes, *begins.sizes])),
    )


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
    fitting = [t for t in fa1.tiles_of_rule(problem, limits) if t.footprint.excess(limits) is None]
    for tile in fitting if problem.block[0] else ():
        if problem.block[0] % tile.block_q == 0 and problem.block[1] % tile.block_kv == 0:
            return tile, f"{said}; the nearest that divides the blocks of block_mask is taken"
    for tile in fitting:
        exact = (tile.block_q, tile.block_kv) == rule
        return tile, said if exact else f"{said}; the nearest that fits is taken"
    *_, smallest = fa1.tiles_of_rule(problem, limits)
    raise nothing_fits(problem, limits, "fa1", smallest)


def _delta_launch(problem: AttentionProblem, limits: DeviceLimits) -> KernelLaunch:
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    tile = steps.delta_tile(rows, limits)
    arithmetic = fa1.arithmetic(problem.storage, limits.compute_capability, 8)
    kernel = ("steps", "delta")
    config = kernel_config(problem, limits, kernel, arithmetic, tile.constants(), tile.footprint)
    # Nothing else changes its code, so every head_dim and mask shares one compilation.
    shared = replace(config, mask="full", copies="element", head_dim=0, head_dim_v=0)
    shared = replace(shared, products="scalar", mma_depth=0)
    return KernelLaunch(shared, tile.grid)

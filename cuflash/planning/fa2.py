"""The plan of FlashAttention-2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..features.packed_group import with_packed_group
from .argument_gradients import ArgumentGradients
from .decision import Algorithm, Plan, asked_tile, nothing_fits
from .device import DeviceLimits
from .fa2_few import every_way, fastest_way
from .head_groups import head_group_of, whole_entries
from .item_lists import ItemLists
from .kernel import KernelLaunch, kernel_config, lay_out
from .key_chunks import KeyChunks, divides, require_one
from .problem import AttentionProblem
from .row_steps import RowSteps, launchable
from .tiles import fa2, steps
from .tiles.common import ceil_div
from .tiles.fa2_few import Fa2FewTile, few_tiles

__all__ = ["fa2_plan", "plans_of_few", "takes_few"]


def fa2_plan(
    problem: AttentionProblem,
    limits: DeviceLimits,
    blocks: tuple[int, int] | None,
    rejected: tuple[tuple[Algorithm, str], ...],
    tile: fa2.Fa2Tile | Fa2FewTile | None = None,
    kv_chunk: int | None = None,
) -> Plan:
    """Return a plan of one thread block for each q tile (forward) or kv tile (backward) of a head.

    ``tile`` replaces the chosen one, for comparisons of tiles.
    """
    problem = with_packed_group(problem)
    reason = "as given"
    if tile is None and blocks is None:
        tile, kv_chunk = _few(problem, limits, kv_chunk)
        reason = "for few queries"
    if tile is None:
        tile, reason = _tile(problem, limits, blocks, kv_chunk)
    if isinstance(tile, fa2.Fa2ForwardTile | Fa2FewTile):
        return _forward(problem, limits, tile, reason, rejected, kv_chunk or 0)
    return _backward(problem, limits, tile, reason, rejected)


def takes_few(
    problem: AttentionProblem,
    limits: DeviceLimits,
    blocks: tuple[int, int] | None,
    kv_chunk: int | None,
) -> bool:
    """Return whether a pass has the tile for few queries: no other blocks or chunks are asked."""
    return blocks is None and bool(_tiles_of_few(with_packed_group(problem), limits, kv_chunk))


def plans_of_few(problem: AttentionProblem, limits: DeviceLimits) -> Iterator[Plan]:
    """Yield plans of a problem for few queries in every way; the plan takes the fastest."""
    packed = with_packed_group(problem)
    for tile, chunk in every_way(packed, limits, few_tiles(packed, limits)):
        yield fa2_plan(problem, limits, None, (), tile=tile, kv_chunk=chunk)


def _tiles_of_few(
    problem: AttentionProblem, limits: DeviceLimits, kv_chunk: int | None
) -> tuple[Fa2FewTile, ...]:
    """Return the tiles for few queries, if there are any and a chunk consists of whole tiles."""
    tiles = few_tiles(problem, limits)
    return tiles if tiles and divides(kv_chunk, tiles[0].block_kv) else ()


def _few(
    problem: AttentionProblem, limits: DeviceLimits, kv_chunk: int | None
) -> tuple[Fa2FewTile | None, int | None]:
    """Return the tile for few queries and the keys of a chunk; None and the chunk without one."""
    tiles = _tiles_of_few(problem, limits, kv_chunk)
    if not tiles:
        return None, kv_chunk
    return fastest_way(problem, limits, tiles) if kv_chunk is None else (tiles[0], kv_chunk)


def _tile(
    problem: AttentionProblem,
    limits: DeviceLimits,
    blocks: tuple[int, int] | None,
    kv_chunk: int | None,
) -> tuple[fa2.Fa2Tile, str]:
    """Return the first candidate that fits and has work for every multiprocessor."""
    if blocks is not None:
        ways = fa2.tiles_of_blocks(problem, limits, *blocks)
        rule = f"multiples of {fa2.step_of(problem, limits)}"
        if problem.operation == "backward":
            rule += f", block_q a divisor of {steps.ROWS}"
        tile = asked_tile(
            problem, "fa2", blocks, limits, rule, ways, lambda: fa2.all_tiles(problem, limits)
        )
        require_one([tile] * divides(kv_chunk, tile.block_kv), kv_chunk)
        return tile, "blocks as asked"
    tiles = [t for t in fa2.candidates(problem, limits) if divides(kv_chunk, t.block_kv)]
    require_one(tiles, kv_chunk)
    fitting = [tile for tile in tiles if tile.footprint.excess(limits) is None]
    if not fitting:
        raise nothing_fits(problem, limits, "fa2", tiles[-1])
    best = fitting[0]
    if _blocks(problem, best) >= limits.num_sms:
        return best, "the first of the table that fits"
    others = [tile for tile in fitting if tile is best or _is_smaller(tile, best)]

    def value(tile: fa2.Fa2Tile) -> tuple[int, int, int]:
        blocks = _blocks(problem, tile)
        if isinstance(tile, fa2.Fa2ForwardTile) and blocks <= limits.num_sms:
            # Each block is alone on its multiprocessor: no other runs while it waits for K and V.
            return blocks, -tile.block_q, tile.num_stages
        return blocks, -tile.block_q, 0

    chosen = max(others, key=value)
    if chosen is best:
        return best, "the first of the table that fits"
    if (chosen.block_q, chosen.block_kv) == (best.block_q, best.block_kv):
        return chosen, "the form of the first that fits for blocks that are alone"
    return chosen, f"instead of {best.block_q}x{best.block_kv}, for more or smaller blocks"


def _is_smaller(tile: fa2.Fa2Tile, best: fa2.Fa2Tile) -> bool:
    """Return whether a smaller tile is worth more thread blocks: it has at least half the rows.

    With fewer than four warps a multiprocessor would be idle most of the time.
    """
    halves = 2 * tile.block_q >= best.block_q and 2 * tile.block_kv >= best.block_kv
    no_larger = tile.block_q <= max(64, best.block_q) and tile.block_kv <= best.block_kv
    return halves and no_larger and tile.warps >= 4 and tile.arithmetic == best.arithmetic


def _blocks(problem: AttentionProblem, tile: fa2.Fa2Tile | Fa2FewTile) -> int:
    if isinstance(tile, Fa2FewTile):
        return tile.blocks(problem)
    if isinstance(tile, fa2.Fa2ForwardTile):
        return problem.batch * problem.heads_q * problem.tiles(problem.seqlen_q, tile.block_q)
    return problem.batch * problem.heads_kv * problem.tiles(problem.seqlen_kv, tile.block_kv)


def _main_launch(
    problem: AttentionProblem,
    limits: DeviceLimits,
    tile: fa2.Fa2Tile | Fa2FewTile,
    *more: tuple[str, int],
) -> KernelLaunch:
    grid = launchable(_blocks(problem, tile), "fa2")
    kernel = ("fa2", problem.operation)
    footprint = tile.footprint
    constants, forward = tile.constants(), problem.operation == "forward"
    if forward:
        constants |= {"entries_inside": int(problem.shares_pairs)}
    config = kernel_config(problem, limits, kernel, tile.arithmetic, constants, footprint)
    if isinstance(tile, Fa2FewTile):
        widths = tile.head_dim, tile.head_dim_v
        config = replace(config, kernel=tile.kernel, head_dim=widths[0], head_dim_v=widths[1])
    heads = problem.batch * (problem.heads_q if forward else problem.heads_kv)
    tiles = ceil_div(grid, max(1, heads))
    head_group = head_group_of(problem, limits, tiles, footprint.blocks_per_sm)
    if forward:
        head_group = whole_entries(problem, head_group)
    return KernelLaunch(config, grid, (("head_group", head_group), *more))


def _forward(
    problem: AttentionProblem,
    limits: DeviceLimits,
    tile: fa2.Fa2ForwardTile | Fa2FewTile,
    reason: str,
    rejected: tuple[tuple[Algorithm, str], ...],
    kv_chunk: int,
) -> Plan:
    lists = ItemLists(problem, limits, tile.arithmetic, tile.block_q)
    few = isinstance(tile, Fa2FewTile)
    blocks = tile.block_q, tile.block_kv
    chunks = KeyChunks(problem, limits, tile.arithmetic, *blocks, kv_chunk, in_order=few)
    main = _main_launch(chunks.of_parts, limits, tile, *_arguments_of_few(problem, tile))
    grid = launchable(chunks.items(main.grid), "splitting keys")
    main = replace(main, config=chunks.of_main(main.config), grid=grid)
    launches = *lists.before, main, *chunks.after
    workspace = tuple(lay_out([*lists.sizes, *chunks.sizes]))
    return Plan(chunks.problem, "cuda", "fa2", tile, reason, rejected, launches, workspace)


def _arguments_of_few(
    problem: AttentionProblem, tile: fa2.Fa2ForwardTile | Fa2FewTile
) -> tuple[tuple[str, int], ...]:
    """Return the fields of the parameters that only the kernel for few queries has."""
    if not isinstance(tile, Fa2FewTile):
        return ()
    chunk = ("chunk_tiles", tile.chunk // tile.block_kv)
    return chunk, ("heads_of_block", max(1, tile.heads)), ("parts", tile.parts(problem))


def _backward(
    problem: AttentionProblem,
    limits: DeviceLimits,
    tile: fa2.Fa2BackwardTile,
    reason: str,
    rejected: tuple[tuple[Algorithm, str], ...],
) -> Plan:
    turns = steps.ROWS // tile.block_q * tile.warps if tile.ordered else 0
    rows = RowSteps(problem, limits, "fa2", tile.arithmetic, tile.head_dim, turns)
    main = _main_launch(problem, limits, tile, rows.rows)
    others = ArgumentGradients(
        problem, limits, tile.arithmetic, rows.padded_rows, main.config.threads, tile.block_kv
    )
    last_first = tile.ordered and problem.mask != "full"
    lists = ItemLists(problem, limits, tile.arithmetic, tile.block_kv, last_first)
    launches = (*lists.before, *rows.around(main), *others.after)
    workspace = tuple(lay_out([*rows.sizes, *others.sizes, *lists.sizes]))
    return Plan(problem, "cuda", "fa2", tile, reason, rejected, launches, workspace)

"""The plan of FlashAttention-3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..errors import UnsupportedError, install
from ..features.packed_group import with_packed_group
from .argument_gradients import ArgumentGradients
from .backward_head_group import backward_head_group, is_uneven
from .block_bits import bits_of_tiles
from .decision import Algorithm, Plan
from .device import DeviceLimits
from .fa3_choice import chosen_tile
from .fa3_few import few_plan
from .fa3_short import short_plan
from .head_groups import even_head_group, whole_entries
from .hopper import ARCHITECTURE, for_hopper
from .item_lists import ItemLists
from .kernel import KernelConfig, KernelLaunch, kernel_config, lay_out
from .key_chunks import KeyChunks
from .key_parts import ONE_PART, KeyParts, Parts
from .overlapping import overlapping
from .parts_choice import has_half_step, parts_of
from .problem import DTYPES, AttentionProblem
from .row_order import RowOrder
from .row_steps import RowSteps, launchable
from .tiles import fa3, steps
from .tiles.fa3_few import Fa3FewTile
from .tiles.fa3_short import Fa3ShortTile

__all__ = ["OLDEST_NVRTC", "fa3_plan", "needs_newer_compiler"]

#: The first version that takes a second -arch option: sm_90a beside the one that CuPy gives.
OLDEST_NVRTC = (12, 9)

#: Tickets are 32-bit numbers, and exceed the number of tiles by up to the number of blocks.
_MOST_TILES = 2**30


def fa3_plan(
    problem: AttentionProblem,
    limits: DeviceLimits,
    blocks: tuple[int, int] | None,
    rejected: tuple[tuple[Algorithm, str], ...],
    tile: fa3.Fa3Tile | None = None,
    parts: Parts | None = None,
    kv_chunk: int | None = None,
) -> Plan:
    """Return the plan of a forward or backward pass.

    Forward: one or more blocks for every multiprocessor draw the q tiles of all heads.

    Backward: a block for each kv tile of each head, or for a part of its query heads or steps.

    ``tile`` and ``parts`` replace the chosen tile and the way in which blocks share a
    kv tile, for comparisons.
    """
    reason = _why_not(problem, limits)
    if reason is not None:
        raise UnsupportedError(f"fa3 {reason}")
    problem = with_packed_group(problem)
    why, chunk = "as given", kv_chunk or 0
    if tile is None:
        tile, why, chunk = chosen_tile(problem, limits, blocks, kv_chunk)
    if isinstance(tile, fa3.Fa3ForwardTile):
        return _forward(problem, limits, tile, why, rejected, chunk)
    if isinstance(tile, Fa3FewTile):
        return few_plan(problem, limits, tile, why, rejected)
    if isinstance(tile, Fa3ShortTile):
        return short_plan(problem, limits, tile, why, rejected)
    return _backward(problem, limits, tile, why, rejected, parts)


def needs_newer_compiler(problem: AttentionProblem, limits: DeviceLimits) -> str | None:
    """Return what to install for fa3, if only the compiler is too old for it; else None."""
    enough = replace(limits, nvrtc=OLDEST_NVRTC)
    if limits.nvrtc >= OLDEST_NVRTC or _why_not(problem, enough):
        return None
    return _compiler_reason(limits)


def _compiler_reason(limits: DeviceLimits) -> str:
    found, needed = (".".join(map(str, v)) for v in (limits.nvrtc, OLDEST_NVRTC))
    extra = f"cuda{max(12, limits.nvrtc[0])}"
    return f"needs NVRTC {needed} or newer, this is {found}: {install(extra, '-U ')}"


def _why_not(problem: AttentionProblem, limits: DeviceLimits) -> str | None:
    """Return why fa3 has no kernel for a problem on a device; None if it has one."""
    if limits.compute_capability != (9, 0):
        capability = "{}.{}".format(*limits.compute_capability)
        return f"is for Hopper, compute capability 9.0; this device has {capability}"
    if DTYPES[problem.storage].itemsize != 2:
        return f"takes float16 and bfloat16, not {problem.storage}"
    if problem.alignment != "tensor_map":
        return (
            "loads through the copy engine, which needs rows and strides of positive multiples "
            "of 16 bytes"
        )
    if problem.operation == "forward":
        for name, operand in problem.operands.items():
            if operand.staged and not operand.mappable:
                elements = 16 // DTYPES[operand.dtype].itemsize
                return (
                    f"loads {name} through the copy engine, which needs rows that begin at "
                    "positive multiples of 16 bytes: pad the last axis in memory to a multiple "
                    f"of {elements} elements"
                )
    if problem.seqlen_kv == 0:
        return "needs at least one key"
    if problem.page_size:
        if problem.page_size % 8:
            return f"takes pages of a multiple of 8 keys, not of {problem.page_size}"
        if "cache_leftpad" in problem.operands:
            return "takes no cache_leftpad beside a page_table"
    if problem.operation == "backward" and problem.heads_q * problem.seqlen_q == 0:
        return "needs at least one query"
    if limits.nvrtc < OLDEST_NVRTC:
        return _compiler_reason(limits)
    return None


def _forward(
    problem: AttentionProblem,
    limits: DeviceLimits,
    tile: fa3.Fa3ForwardTile,
    reason: str,
    rejected: tuple[tuple[Algorithm, str], ...],
    kv_chunk: int,
) -> Plan:
    chunks = KeyChunks(problem, limits, fa3.ARITHMETIC, tile.block_q, tile.block_kv, kv_chunk)
    bits = bits_of_tiles(problem, limits, fa3.ARITHMETIC, tile.block_q, tile.block_kv)
    config = _forward_config(chunks, tile, bits.constants)
    tiles_of_head = problem.tiles(problem.seqlen_q, tile.block_q)
    tiles = chunks.items(problem.batch * problem.heads_q * tiles_of_head)
    if tiles > _MOST_TILES:
        raise UnsupportedError(f"fa3 would need {tiles:,} tiles, it can count {_MOST_TILES:,}")
    head_group = 1
    if is_uneven(problem):  # otherwise tiles take about equal time, and groups of one head suffice
        head_group = even_head_group(problem, limits)
    head_group = whole_entries(problem, head_group)
    grid = min(tiles, limits.num_sms * tile.blocks_per_sm)
    boxes = (
        ("q", fa3.ROWS),
        ("k", problem.box_rows(tile.block_kv)),
        ("v", problem.box_rows(tile.block_kv)),
        *_operand_boxes(problem, tile),
    )
    launch = KernelLaunch(config, grid, (("head_group", head_group),), boxes)
    lists = ItemLists(problem, limits, fa3.ARITHMETIC, tile.block_q)
    launches = tuple(map(for_hopper, (*bits.before, *lists.before, launch, *chunks.after)))
    workspace = tuple(lay_out([("tile_counter", 4), *bits.sizes, *lists.sizes, *chunks.sizes]))
    return Plan(chunks.problem, "cuda", "fa3", tile, reason, rejected, launches, workspace)


def _forward_config(
    chunks: KeyChunks, tile: fa3.Fa3ForwardTile, more: dict[str, int]
) -> KernelConfig:
    problem, footprint = chunks.of_parts, tile.footprint
    constants = tile.constants() | {"entries_inside": int(problem.shares_pairs)} | more
    config = kernel_config(
        problem, chunks.limits, ("fa3", "forward"), fa3.ARITHMETIC, constants, footprint
    )
    return replace(
        chunks.of_main(config),
        architecture=ARCHITECTURE,
        head_dim=tile.head_dim,
        head_dim_v=tile.head_dim_v,
    )


def _backward(
    problem: AttentionProblem,
    limits: DeviceLimits,
    tile: fa3.Fa3BackwardTile,
    reason: str,
    rejected: tuple[tuple[Algorithm, str], ...],
    parts: Parts | None,
) -> Plan:
    _check_pair_sums(problem, tile)
    tile, shared = _with_parts(problem, limits, tile, parts)
    keys = KeyParts(problem, limits, tile, shared)
    bits = bits_of_tiles(problem, limits, fa3.ARITHMETIC, tile.block_q, tile.block_kv)
    constants = tile.constants(bits.of_each_tile) | keys.constants | bits.constants
    tiles = problem.tiles(problem.seqlen_kv, tile.block_kv)
    head_group = backward_head_group(problem, limits, tile, tiles, shared)
    heads, rounds = problem.batch * keys.heads, tile.kv_tiles_per_convert_block
    clears = not (tile.stays or (shared.cut and not shared.last))
    order = RowOrder(heads, tiles, head_group, rounds, limits.num_sms, clears, shared)
    if shared.last > order.ahead:
        raise UnsupportedError(f"fa3 cuts the last {order.ahead} kv tiles here, not {shared.last}")
    turns = _counters(tile)
    cleared = order.heads_ahead * problem.group * problem.heads_kv // keys.heads
    rows = RowSteps(problem, limits, "fa3", fa3.ARITHMETIC, tile.head_dim, turns, cleared)
    main = _backward_launch(problem, limits, tile, constants, order, (*keys.arguments, rows.rows))
    every = (rows.before, main) if tile.kv_tiles_per_convert_block else rows.around(main)
    others = ArgumentGradients(
        problem, limits, fa3.ARITHMETIC, rows.padded_rows, main.config.threads, tile.block_kv
    )
    lists = ItemLists(problem, limits, fa3.ARITHMETIC, tile.block_kv, tile.ordered)
    every = *every, *keys.after
    every = every if problem.uses else overlapping(every)
    launches = tuple(map(for_hopper, (*bits.before, *lists.before, *every, *others.after)))
    sizes = [*rows.sizes, *keys.sizes, *others.sizes, *bits.sizes, *lists.sizes]
    workspace = tuple(lay_out(sizes))
    reason += keys.said
    return Plan(problem, "cuda", "fa3", tile, reason, rejected, launches, workspace)


def _with_parts(
    problem: AttentionProblem,
    limits: DeviceLimits,
    tile: fa3.Fa3BackwardTile,
    parts: Parts | None,
) -> tuple[fa3.Fa3BackwardTile, Parts]:
    """Return the tile for these lengths, and how blocks share a kv tile."""
    if problem.sequences:
        return replace(tile, kv_tiles_per_convert_block=0), ONE_PART
    at_once = limits.num_sms * tile.footprint.blocks_per_sm
    shared = parts or parts_of(problem, tile, at_once)
    if shared.cut and not shared.last:  # no block has all rows of a head
        tile = replace(tile, kv_tiles_per_convert_block=0)
    stays = _stays(problem, tile, shared.number)
    half_last = shared.number == 1 and not stays and has_half_step(problem, tile)
    return replace(tile, stays=stays, half_last=half_last), shared


def _backward_launch(
    problem: AttentionProblem,
    limits: DeviceLimits,
    tile: fa3.Fa3BackwardTile,
    constants: dict[str, int],
    order: RowOrder,
    others: tuple[tuple[str, int], ...],
) -> KernelLaunch:
    """Return the launch of the main kernel, with these arguments among others."""
    config = kernel_config(
        problem, limits, ("fa3", "backward"), fa3.ARITHMETIC, constants, tile.footprint
    )
    config = replace(config, head_dim=tile.head_dim, head_dim_v=tile.head_dim_v)
    arguments = [("head_group", order.head_group), ("ahead", order.ahead), *others]
    if tile.kv_tiles_per_convert_block:
        arguments.insert(-1, ("convert_lag", order.convert_lag))
    blocks = min(order.blocks, limits.num_sms) if tile.stays else order.blocks
    return KernelLaunch(config, launchable(blocks, "fa3"), tuple(arguments), _boxes(problem, tile))


def _stays(problem: AttentionProblem, tile: fa3.Fa3BackwardTile, parts: int) -> bool:
    """Return whether a block computes several kv tiles: if each has few steps. No features."""
    steps = problem.group * problem.tiles(problem.seqlen_q, tile.block_q)
    others = tile.ordered, tile.operand.stages, tile.kv_tiles_per_convert_block
    plain = not (problem.uses or any(others))
    return plain and parts == 1 and steps <= tile.stays_until


def _boxes(problem: AttentionProblem, tile: fa3.Fa3BackwardTile) -> tuple[tuple[str, int], ...]:
    """Return the tensors of a backward pass that are loaded through maps, and rows of a copy."""
    of_q, of_kv = tile.block_q, tile.block_kv
    inputs = (("q", of_q), ("k", of_kv), ("v", of_kv), ("dout", of_q))
    return (*inputs, *_operand_boxes(problem, tile))


def _operand_boxes(problem: AttentionProblem, tile: fa3.Fa3Tile) -> Iterator[tuple[str, int]]:
    """Yield the array of pairs that is loaded tile by tile, and the rows of a tile."""
    stages, rows, _ = tile.operand
    for name, operand in problem.operands.items():
        if stages and operand.staged:
            yield name, rows


def _check_pair_sums(problem: AttentionProblem, tile: fa3.Fa3BackwardTile) -> None:
    """Refuse gradients that need P and P times slopes, if warpgroups pass tiles to each other."""
    summed = [use.pair_sums for use in problem.uses if use.pair_sums]
    slopes = any(use.unit is not None for use in problem.uses)
    if summed and slopes and tile.shares_keys:
        raise UnsupportedError(
            f"fa3 has no gradient of {summed[0]} beside a function of scores in heads of "
            f"{problem.head_dim}/{problem.head_dim_v}"
        )


def _counters(tile: fa3.Fa3BackwardTile) -> int:
    """Return the number of counters for every block of ``statistics``, which has rows of one head.

    There are at most two for every kv head or part of one, and with ordered sums one more for
    every q tile. Where every kv tile is cut, none is used.
    """
    return 2 + steps.ROWS // tile.block_q * tile.ordered

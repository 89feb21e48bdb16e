"""Chooses a tile of FlashAttention-3, and the chunks that split its keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from ..errors import ArgumentValueError, UnsupportedError
from .device import DeviceLimits
from .forward_time import ForwardWork, chunks_to_try, is_small
from .key_chunks import divides, may_split, require_one
from .problem import AttentionProblem
from .tiles import fa3, steps
from .tiles.fa3_lengths import LengthsTile

__all__ = ["chosen_tile", "nearly_fastest", "steadiest"]

#: Tile, the reason for it, and keys of a chunk.
_Choice = tuple[fa3.Fa3Tile, str, int]


def chosen_tile(
    problem: AttentionProblem,
    limits: DeviceLimits,
    blocks: tuple[int, int] | None,
    kv_chunk: int | None,
) -> _Choice:
    """Return a tile, the reason for it, and the keys of a chunk.

    The tile has the requested blocks, if there are any. Otherwise a forward pass with few tiles has
    the tile and the chunk that are predicted to be the fastest, and any other pass has the first
    candidate for these widths and lengths.
    """
    if blocks is not None:
        return _asked_tile(problem, limits, blocks, kv_chunk), "blocks as asked", kv_chunk or 0
    best = min(_ways(problem, limits, kv_chunk), key=_time_and_blocks, default=None)
    if best is not None:
        return best[1]
    for tile in fa3.candidates(problem, limits, every=bool(kv_chunk)):
        if divides(kv_chunk, tile.block_kv):
            return tile, "the first of the table for these lengths", kv_chunk or 0
    require_one([], kv_chunk)
    of_pages = f" and pages of {problem.page_size} keys" * (problem.page_size > 0)
    raise UnsupportedError(
        f"fa3 has no tile for head_dim {problem.head_dim}/{problem.head_dim_v}{of_pages} "
        f"in {limits.shared_per_block:,} bytes of shared memory"
    )


def nearly_fastest(
    problem: AttentionProblem, limits: DeviceLimits, within: float
) -> Iterator[tuple[fa3.Fa3Tile, int]]:
    """Yield tiles and chunks of a forward pass with few tiles that are nearly the fastest.

    Their predicted time is at most ``1 + within`` times the shortest; calls that are a
    little larger or smaller may take them. Each tile comes at most three times: without
    chunks, with few and with many. Other problems yield nothing.
    """
    ways = list(_ways(problem, limits, None))
    shortest = min((time for time, _ in ways), default=0.0)
    found: dict[tuple[fa3.Fa3Tile, int], int] = {}
    for time, (tile, _, chunk) in ways:
        if time <= (1 + within) * shortest:
            many = chunk > 0 and problem.seqlen_kv > steps.MERGE_WARPS * chunk
            found[tile, (chunk > 0) + many] = chunk
    yield from ((tile, chunk) for (tile, _), chunk in found.items())


def steadiest(
    problem: AttentionProblem, limits: DeviceLimits, batches: Sequence[int]
) -> tuple[fa3.Fa3Tile, int] | None:
    """Return the tile and the chunk of a forward pass that are nearly the fastest in all batches.

    For every batch size the predicted time of a choice is divided by the shortest time.
    The returned choice has the smallest maximum of these ratios. None if a pass has many
    tiles.
    """
    worst: dict[tuple[fa3.Fa3Tile, int], float] = {}
    for batch in batches:
        ways = list(_ways(replace(problem, batch=batch), limits, None, every=True))
        shortest = min((time for time, _ in ways), default=0.0)
        for time, (tile, _, chunk) in ways:
            ratio = time / shortest if shortest else 1.0
            worst[tile, chunk] = max(worst.get((tile, chunk), 0.0), ratio)
    if not any(True for _ in _ways(problem, limits, None)) or not worst:
        return None
    return min(worst, key=lambda way: (worst[way], way[0].block_q, -way[0].footprint.blocks_per_sm))


def _time_and_blocks(way: tuple[float, _Choice]) -> tuple[float, int]:
    """Return a sort key: the time; of equal times more blocks per multiprocessor come first."""
    time, (tile, _, _) = way
    return time, -tile.footprint.blocks_per_sm


def _asked_tile(
    problem: AttentionProblem,
    limits: DeviceLimits,
    blocks: tuple[int, int],
    kv_chunk: int | None,
) -> fa3.Fa3Tile:
    listed = [*fa3.candidates(problem, limits), *fa3.candidates(problem, limits, every=True)]
    # Requested blocks name the same tile at all lengths, so that a row's bits stay the same.
    listed.sort(key=lambda tile: isinstance(tile, LengthsTile))
    for tile in listed:
        if (tile.block_q, tile.block_kv) == blocks:
            require_one([tile] * divides(kv_chunk, tile.block_kv), kv_chunk)
            return tile
    names = ", ".join(dict.fromkeys(f"({t.block_q}, {t.block_kv})" for t in listed))
    raise ArgumentValueError("blocks", str(blocks), f"one of {names}")


def _ways(
    problem: AttentionProblem, limits: DeviceLimits, kv_chunk: int | None, every: bool = False
) -> Iterator[tuple[float, _Choice]]:
    """Yield the choices of a forward pass with few tiles, each with its predicted time.

    With ``every`` a pass with many tiles has choices too.
    """
    if problem.operation != "forward" or not may_split(problem):
        return
    first = next(iter(fa3.candidates(problem, limits)), None)
    if first is None or first.operand.stages:
        return
    if not every and not is_small(problem, _items(problem, first), limits):
        return
    chunks = chunks_to_try(problem) if kv_chunk is None else [kv_chunk]
    for tile, chunk in product(fa3.candidates(problem, limits, every=True), chunks):
        if not isinstance(tile, fa3.Fa3ForwardTile) or tile.step is None:
            continue
        if divides(chunk, tile.block_kv):
            work = ForwardWork(
                *(problem, limits, tile.block_q, tile.block_kv),
                *(tile.blocks_per_sm, chunk),
            )
            yield work.time(tile.step), (tile, "the fastest for so few tiles", chunk)


def _items(problem: AttentionProblem, tile: fa3.Fa3Tile) -> int:
    return problem.batch * problem.heads_q * problem.tiles(problem.seqlen_q, tile.block_q)

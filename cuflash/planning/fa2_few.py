"""Chooses how FlashAttention-2's forward pass for few queries is divided.

A way is a tile and a chunk. The tile says how many rows a block has and whether it merges
the chunks of its rows. A row has the same bits in every way with its chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from .device import DeviceLimits
from .fa2_few_time import FewWork
from .key_chunks import divides, may_split
from .problem import AttentionProblem
from .tiles.common import ceil_div
from .tiles.fa2_few import ROWS, Fa2FewTile, merging_tile

__all__ = ["Way", "every_way", "fastest_way", "steadiest_chunk"]

#: A tile, and the keys for which there is a block each; 0: keys are not split.
Way = tuple[Fa2FewTile, int]

#: The chunks that are tried, in keys; 0: keys are not split.
_CHUNKS = (0, *(1 << n for n in range(6, 21)))
#: Most chunks of a row, unless the longest chunk gives more.
_MOST_CHUNKS = 64
#: Loads are even where between these parts of all multiprocessors have a block. Blocks that merge
#: chunks (True) leave the memory to others meanwhile.
_EVEN_FROM, _EVEN_TO = {False: 0.45, True: 0.57}, 0.9


def fastest_way(
    problem: AttentionProblem,
    limits: DeviceLimits,
    tiles: Sequence[Fa2FewTile],
    chunk: int | None = None,
) -> Way:
    """Return the way whose predicted time is the shortest; with ``chunk`` among those with it."""
    chunks = _chunks(problem, tiles[0]) if chunk is None else [chunk]
    works = [work for one in chunks for work in _works(problem, limits, tiles, one)]
    best = min(works, key=lambda work: work.time)
    return best.tile, 0 if best.merges else best.chunk


def steadiest_chunk(
    problem: AttentionProblem,
    limits: DeviceLimits,
    tiles: Sequence[Fa2FewTile],
    batches: Sequence[int],
) -> int:
    """Return the chunk that is nearly the fastest in all batches.

    For each batch the time of the fastest way with a chunk is divided by the shortest, and
    the chunk has the least sum of the squares of these ratios.
    """
    chunks = _chunks(problem, tiles[0])
    squares = dict.fromkeys(chunks, 0.0)
    for batch in batches:
        own = replace(problem, batch=batch)
        times = {c: min(work.time for work in _works(own, limits, tiles, c)) for c in chunks}
        shortest = min(times.values())
        for chunk in chunks:
            squares[chunk] += (times[chunk] / shortest) ** 2
    return min(chunks, key=lambda chunk: squares[chunk])


def _works(
    problem: AttentionProblem, limits: DeviceLimits, tiles: Sequence[Fa2FewTile], chunk: int
) -> Iterator[FewWork]:
    """Yield the ways with a chunk: with every tile, and merged by its blocks.

    Blocks with more rows than they have to have leave results of chunks little room.
    """
    for tile in tiles:
        yield _with_even_loads(FewWork(problem, limits, tile, chunk))
    merging = merging_tile(tiles[-1], limits, chunk) if chunk and problem.has_pairs else None
    if merging is not None:
        yield _with_even_loads(FewWork(problem, limits, merging, chunk, merges=True))


def every_way(
    problem: AttentionProblem, limits: DeviceLimits, tiles: Sequence[Fa2FewTile]
) -> Iterator[Way]:
    """Yield the ways that some batch takes, each with one chunk."""
    chunks = _CHUNKS[:2] if may_split(problem) else (0,)
    merging = merging_tile(tiles[-1], limits, chunks[-1]) if chunks[-1] else None
    for tile, chunk in (*product(tiles, chunks), *(((merging, 0),) if merging else ())):
        yield tile, chunk
        if tile.rows == ROWS and not problem.float8:
            yield tile.with_even_loads(), chunk


def _with_even_loads(work: FewWork) -> FewWork:
    """Return the way with loads that are as even as they have to be."""
    busy = work.blocks / work.limits.num_sms
    if work.problem.float8 or work.tile.rows > ROWS:
        return work
    if not _EVEN_FROM[work.merges] < busy < _EVEN_TO:
        return work
    return replace(work, tile=work.tile.with_even_loads())


def _chunks(problem: AttentionProblem, tile: Fa2FewTile) -> list[int]:
    """Return the chunks to try, with 0."""
    keys = problem.seqlen_kv
    if not (may_split(problem) and problem.has_pairs):
        return [0]
    least = min(_CHUNKS[-1], ceil_div(keys, _MOST_CHUNKS))
    fitting = [c for c in _CHUNKS if least <= c < keys or not c]
    return [c for c in fitting if divides(c, tile.block_kv)]

"""Plans whose rows have the same bits in a batch of any size."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from ..features.packed_group import with_packed_group
from ..features.use import Use
from .decision import Algorithm, Plan
from .device import DeviceLimits, HostLimits
from .fa2 import fa2_plan
from .fa2_few import fastest_way, steadiest_chunk
from .fa3 import fa3_plan
from .fa3_choice import steadiest
from .key_chunks import chunk_of
from .plan import plan
from .problem import AttentionProblem
from .tiles.fa2_few import FEWEST_OF_WHOLE_TILES, Fa2FewTile, few_tiles, with_whole_rows

__all__ = ["batch_invariant_plan"]

#: The batch sizes that a tile and a chunk are chosen for, if their times are predicted. One entry
#: counts twice: somebody waits for it.
_BATCHES = (1, 1, 2, 4, 8, 16, 32, 64, 128)
#: The batch size otherwise.
_USUAL_BATCH = 8
#: The largest number of queries of an entry that matters: more queries change no choice.
_MOST_QUERIES = 2**17


def batch_invariant_plan(
    problem: AttentionProblem,
    limits: DeviceLimits | HostLimits,
    *,
    algorithm: Algorithm | Literal["auto"] = "auto",
    blocks: tuple[int, int] | None = None,
    kv_chunk: int | None = None,
) -> Plan:
    """Return the plan of a forward pass in a tile and a chunk that do not depend on the batch.

    Like :func:`~cuflash.planning.plan.plan` it is pure, and it has the same errors. The
    order of the operations on a row depends on the tile and the chunk alone.
    """
    if isinstance(limits, HostLimits):  # the NumPy code computes every row alike
        return plan(problem, limits, algorithm=algorithm, blocks=blocks, kv_chunk=kv_chunk)
    asked_for = limits, algorithm, blocks, kv_chunk
    first, tiles, chunk, reason = _choice(_usual(problem), *asked_for)
    if first.algorithm == "fa1":
        asked = first.tile.block_q, first.tile.block_kv
        same = plan(problem, limits, algorithm="fa1", blocks=asked)
        return replace(same, reason=reason, rejected=first.rejected)
    if problem.most_queries and isinstance(tiles[0], Fa2FewTile):
        tiles = _with_whole_rows(tiles, limits)
        if not tiles:
            usual = _usual(problem, FEWEST_OF_WHOLE_TILES)
            first, tiles, chunk, reason = _choice(usual, *asked_for)
    tile = tiles[0]
    if isinstance(tile, Fa2FewTile):
        tile, chunk = fastest_way(with_packed_group(problem), limits, tiles, chunk)
    same = _OF_TILE[first.algorithm](problem, limits, None, (), tile=tile, kv_chunk=chunk)
    return replace(same, reason=reason, rejected=first.rejected)


def _with_whole_rows(tiles: tuple[Fa2FewTile, ...], limits: DeviceLimits) -> tuple[Fa2FewTile, ...]:
    """Return those of the tiles that have room for results of all their rows, with these."""
    whole = (with_whole_rows(tile, limits) for tile in tiles)
    return tuple(tile for tile in whole if tile is not None)


@functools.lru_cache(maxsize=256)  # calls of packed queries differ in the total of their rows
def _choice(
    usual: AttentionProblem,
    limits: DeviceLimits,
    algorithm: Algorithm | Literal["auto"],
    blocks: tuple[int, int] | None,
    kv_chunk: int | None,
) -> tuple[Plan, tuple[Any, ...], int, str]:
    """Return the plan of the usual problem, and tiles, chunk and reason for any batch.

    Several tiles give a row the same bits.
    """
    first = plan(usual, limits, algorithm=algorithm, blocks=blocks, kv_chunk=kv_chunk)
    packed = with_packed_group(usual)
    if first.algorithm == "fa3" and blocks is None and kv_chunk is None:
        steady = steadiest(packed, limits, _BATCHES)
        if steady is not None:
            tile, chunk = steady
            return first, (tile,), chunk, "nearly the fastest in batches of any size"
    if not isinstance(first.tile, Fa2FewTile):
        return first, (first.tile,), chunk_of(first.problem), first.reason
    tiles = few_tiles(packed, limits)
    if kv_chunk is not None:
        return first, tiles, kv_chunk, first.reason
    steady_chunk = steadiest_chunk(packed, limits, tiles, _BATCHES)
    return first, tiles, steady_chunk, "for few queries, in batches of any size"


def _usual(problem: AttentionProblem, fewest: int = 2) -> AttentionProblem:
    """Return the problem with the usual number of entries.

    With packed queries every entry has the most queries that an entry may have, at least
    ``fewest``: heads with one query would become rows of one tile, which packed queries do not.
    """
    if not problem.most_queries:
        return replace(problem, batch=_USUAL_BATCH)
    queries = min(max(fewest, problem.most_queries), _MOST_QUERIES)
    further = problem.seqlen_q - queries  # keys by which query 0 moves on: the last query stays
    return replace(
        problem,
        batch=_USUAL_BATCH,
        seqlen_q=queries,
        q_offset=problem.q_offset + further if problem.has_last else 0,
        q_first=problem.q_first + further if problem.has_first else 0,
        uses=tuple(_moved(use, further) for use in problem.uses if use.feature != "packed_queries"),
        sequences=0,
        most_queries=0,
    )


def _moved(use: Use, further: int) -> Use:
    """Return a use where query 0 stands so many keys further: a window then begins there."""
    numbers = tuple((n, v + further if n == "first" else v) for n, v in use.numbers)
    return replace(use, numbers=numbers) if use.feature == "window" else use


_OF_TILE: dict[str, Callable[..., Plan]] = {"fa2": fa2_plan, "fa3": fa3_plan}

"""FlashAttention-3: backward tiles for few queries, and where they are the fastest."""

from __future__ import annotations

from collections.abc import Iterator

from ..device import DeviceLimits
from ..problem import AttentionProblem
from .common import ceil_div
from .fa3_few import Fa3FewTile, few_tiles
from .fa3_short import Fa3ShortTile, short_tiles

__all__ = ["LengthsTile", "is_fastest", "tiles_of_lengths"]

#: Tiles that keep queries.
LengthsTile = Fa3FewTile | Fa3ShortTile

#: Most queries with which the tile for short heads is the faster one: they are one of its q tiles.
_ONE_Q_TILE = 64


def tiles_of_lengths(problem: AttentionProblem) -> Iterator[LengthsTile]:
    """Yield the tiles that keep the queries of a backward pass, if it has few; short heads first.

    Where both are the fastest, the first is taken.
    """
    yield from short_tiles(problem)
    yield from few_tiles(problem)


def is_fastest(tile: LengthsTile, problem: AttentionProblem, limits: DeviceLimits) -> bool:
    """Return whether a tile is faster than those that keep keys, as far as it was timed."""
    heads = problem.batch * problem.heads_q
    tiles = problem.tiles(problem.seqlen_kv, tile.block_kv)
    if isinstance(tile, Fa3ShortTile):
        return tiles == 1 or (_fills(heads, limits) and not _is_for_few(problem))
    if problem.deterministic or tiles == 1:
        return False
    return heads * tiles > limits.num_sms or not tile.many


def _is_for_few(problem: AttentionProblem) -> bool:
    """Return whether the tile for few queries is faster than that for short heads."""
    fits = any(True for _ in few_tiles(problem)) and not problem.deterministic
    return fits and problem.seqlen_q > _ONE_Q_TILE


def _fills(heads: int, limits: DeviceLimits) -> bool:
    """Return whether blocks that take one head after the other leave few multiprocessors idle."""
    rounds = ceil_div(heads, limits.num_sms)
    return 8 * heads >= 7 * rounds * limits.num_sms

"""Chooses how blocks share a kv tile, by a model of the time of a pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .key_parts import ONE_PART, Parts
from .problem import AttentionProblem
from .tiles import fa3
from .tiles.common import ceil_div

__all__ = ["has_half_step", "kinds_of_parts", "parts_of"]

#: Microseconds of a step of 64 queries and 128 keys in heads of 128, on an H200; a step of
#: another tile takes as long as its products. This and the times below are fitted to measured
#: times: see "Steps in parts" in ``bench/NOTES.md``.
_STEP = 2.1
#: Time of a step where scores are queries x keys, relative to what its products say: 2.77 us of 96
#: keys in heads of 192, where 64 keys in the other form take 2.2.
_OF_QUERIES_BY_KEYS = 0.85
#: Microseconds of a pass beside its blocks.
_FIXED = 10.0
#: Time of a block's begin and end, in steps.
_STEPS_OF_BLOCK = 1.5
#: Fraction of the longest block's steps that is added as tail. Blocks run longest first. The
#: second one is for wide heads, whose warpgroups share the keys of a tile.
_OF_LONGEST, _OF_LONGEST_WIDE = 0.15, 0.3
#: Microseconds of the kernel that adds partial tiles, beside its memory accesses.
_SUM = 3.0
#: Bytes a microsecond at which partial tiles are written and read.
_PARTS_RATE = 3.1e6
#: Bytes of a sum of dQ that other kernels clear and read, and of dq, where steps are cut; and the
#: bytes a microsecond.
_BYTES_OF_SUM, _SUMS_RATE = 10, 4e6
#: Largest time, relative to that without parts, for which parts are worth one more kernel.
_WORTH = 0.95
#: The same where only the last tiles are cut and a step has 64 queries. Of passes with 128 queries
#: a step the model predicts 2 % too much gain.
_WORTH_OF_LAST = 0.987
#: Most blocks that cut the steps of a kv tile.
_MOST_CUTS = 32
#: Rounds of kv tiles from which on there are no parts, whatever their steps are.
_MANY_ROUNDS = 64
#: The same where only the last tiles are cut: after so many rounds blocks end at any time, and the
#: last ones begin early.
_MANY_EVEN_ROUNDS = 16


def parts_of(problem: AttentionProblem, tile: fa3.Fa3BackwardTile, at_once: int) -> Parts:
    """Return how blocks share a kv tile.

    For example, 32 query heads on one kv head, two batch entries and 64 tiles give 128
    blocks of very unequal length for 132 multiprocessors: one block computes the
    longest tile for all heads long after others have ended. One head of 4096 keys has 32
    tiles, which leave 100 multiprocessors idle. ``bench/NOTES.md`` compares the predicted
    and measured times.

    Parameters
    ----------
    problem
        A backward pass.
    tile
        The tile of the main kernel.
    at_once
        Number of blocks that run at a time.
    """
    tiles = problem.tiles(problem.seqlen_kv, tile.block_kv)
    if problem.batch * problem.heads_kv * tiles > _MANY_ROUNDS * at_once:
        return ONE_PART
    steps = _StepsOfTiles.of(_lengths(problem, tile))
    if problem.batch * problem.heads_q * steps.total == 0:
        return ONE_PART
    choices = (*_choices(problem), *_last_tiles(problem, steps, at_once))
    times = {p: _time(p, problem, tile, steps, at_once) for p in choices}
    best = min(times, key=lambda parts: times[parts])  # the first of equals
    worth = _WORTH_OF_LAST if best.last and tile.block_q == fa3.ROWS else _WORTH
    return best if times[best] < worth * times[ONE_PART] else ONE_PART


class _StepsOfTiles(NamedTuple):
    """The steps of a query head in the kv tiles."""

    tiles: int
    shortest: int  # the fewest steps of a tile
    longest: int
    total: int

    @classmethod
    def of(cls, lengths: list[int]) -> _StepsOfTiles:
        """Return the steps of tiles with these numbers of q tiles."""
        least, most = min(lengths, default=0), max(lengths, default=0)
        return cls(len(lengths), least, most, sum(lengths))

    @property
    def even(self) -> bool:
        """Whether all tiles have equally many steps, so that blocks run in rounds."""
        return self.shortest == self.longest


def _time(
    parts: Parts,
    problem: AttentionProblem,
    tile: fa3.Fa3BackwardTile,
    of_tiles: _StepsOfTiles,
    at_once: int,
) -> float:
    """Return the predicted microseconds of a pass."""
    heads = problem.batch * problem.heads_kv
    longest = of_tiles.longest * problem.group
    block = ceil_div(longest, parts.number) + _STEPS_OF_BLOCK
    total = of_tiles.total * problem.group
    if parts == ONE_PART and has_half_step(problem, tile):
        block -= problem.group / 2
        total -= of_tiles.tiles * problem.group // 2
    cut = parts.last or heads * of_tiles.tiles
    blocks = cut * parts.number
    if of_tiles.even:
        steps = ceil_div(blocks, at_once) * block
        whole = heads * of_tiles.tiles - cut
        steps += ceil_div(whole, at_once) * (longest + _STEPS_OF_BLOCK)
    else:
        share = (heads * total + _STEPS_OF_BLOCK * blocks) / at_once
        tail = _OF_LONGEST_WIDE if tile.shares_keys else _OF_LONGEST
        steps = max(block, share + tail * block)
    products = tile.block_q * tile.block_kv * (3 * tile.head_dim + 2 * tile.head_dim_v)
    step = _STEP * products / (64 * 128 * 128 * 5)
    if tile.block_kv % fa3.ROWS:
        step *= _OF_QUERIES_BY_KEYS
    time = _FIXED + step * steps
    if parts.number > 1:
        numbers = blocks * tile.block_kv * (tile.head_dim + tile.head_dim_v)
        time += _SUM + 8 * numbers / _PARTS_RATE
    if parts.cut and not parts.last:
        rows = problem.batch * problem.heads_q * problem.seqlen_q
        time += rows * tile.head_dim * _BYTES_OF_SUM / _SUMS_RATE
    return time


def _choices(problem: AttentionProblem) -> Iterator[Parts]:
    """Yield the possible ways to share a kv tile, those without cuts first."""
    group = problem.group
    yield from (Parts(n) for n in range(1, group + 1) if group % n == 0)
    if _may_cut(problem):
        yield from (Parts(n, cut=True) for n in range(2, _MOST_CUTS + 1))


def _last_tiles(
    problem: AttentionProblem, of_tiles: _StepsOfTiles, at_once: int
) -> Iterator[Parts]:
    """Yield the ways to cut the tiles that are left after whole rounds."""
    rounds, last = divmod(problem.batch * problem.heads_kv * of_tiles.tiles, at_once)
    if _may_cut_last(problem) and last and 0 < rounds < _MANY_EVEN_ROUNDS:
        yield from (Parts(n, True, last) for n in range(2, _MOST_CUTS + 1))


def kinds_of_parts(problem: AttentionProblem) -> Iterator[Parts]:
    """Yield one way to share a kv tile for each kernel that such a problem may have."""
    yield from dict.fromkeys((ONE_PART, Parts(problem.group)))
    if _may_cut(problem):
        yield Parts(2, cut=True)
    if _may_cut_last(problem):
        yield Parts(2, cut=True, last=1)


def _may_cut(problem: AttentionProblem) -> bool:
    """Return whether blocks may begin and end inside of a query head.

    In a fixed order a block could wait for one that does not run yet. Features have not been
    tried with cuts: some sum gradients by head, or list the steps of a tile.
    """
    return not (problem.uses or problem.deterministic)


def _may_cut_last(problem: AttentionProblem) -> bool:
    """Return whether the last tiles may be cut: if all have equally many steps."""
    return problem.mask == "full" and _may_cut(problem)


def has_half_step(problem: AttentionProblem, tile: fa3.Fa3BackwardTile) -> bool:
    """Return whether at most half of the last q tile lies within the length. No features.

    The step of that tile then takes about half as long, if a block has a whole kv tile.
    """
    rest = problem.seqlen_q % tile.block_q
    few = 1 < problem.tiles(problem.seqlen_q, tile.block_q) <= tile.halves_until
    others = problem.uses or problem.has_first or tile.ordered
    return few and 0 < rest <= tile.block_q // 2 and not others


def _lengths(problem: AttentionProblem, tile: fa3.Fa3BackwardTile) -> list[int]:
    """Return for each kv tile of a head the number of q tiles of a query head that see it."""
    keys = range(0, problem.seqlen_kv, tile.block_kv)
    ends = (min(key + tile.block_kv, problem.seqlen_kv) for key in keys)
    queries_seeing = problem.visibility.queries_seeing
    seen = (queries_seeing(key, end) for key, end in zip(keys, ends, strict=True))
    return [ceil_div(end, tile.block_q) - begin // tile.block_q for begin, end in seen]

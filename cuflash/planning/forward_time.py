"""Predicts the time of a forward pass with few tiles, to choose its tile and its chunk.

A pass that fills the device takes the first row of its table and does not split
keys. Otherwise the time is predicted for every row and several chunks, and the
shortest one is chosen: ``bench/NOTES.md`` compares predicted and measured times.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .device import DeviceLimits
from .problem import DTYPES, ELEMENTS, AttentionProblem
from .step_time import StepTime
from .tiles.common import ceil_div
from .visibility import Visibility

__all__ = ["ForwardWork", "chunks_to_try", "is_small"]

_Numbers = npt.NDArray[np.int64]

#: The chunks that are tried, in keys; 0: keys are not split.
CHUNKS = (0, *(1 << n for n in range(7, 21)))

#: Most chunks of a row, unless the longest chunk gives more.
_MOST_CHUNKS = 64
#: Queries of a head up to which the first tile of the table may have far too many rows.
_FEW_ROWS = 128

#: Bytes per microsecond of reading K and V, and of writing and reading partial results.
_MEMORY, _PARTS = 4.2e6, 1.2e6
#: Microseconds of a launch of ``merge``, and of an item before its first step and after its last.
_MERGE, _ITEM = 4.0, 1.5
#: Fraction of the empty slots of the last round of blocks that a memory-bound pass loses.
_LOST_OF_ROUND = 0.25


def is_small(problem: AttentionProblem, tiles: int, limits: DeviceLimits) -> bool:
    """Return whether this number of q tiles leaves multiprocessors idle, or queries are few."""
    idle = tiles < 2 * limits.num_sms
    return problem.has_pairs and (idle or problem.seqlen_q <= _FEW_ROWS)


def chunks_to_try(problem: AttentionProblem) -> list[int]:
    """Return the chunks to try, with 0: at most :data:`_MOST_CHUNKS` of a row."""
    keys = problem.seqlen_kv
    return [c for c in CHUNKS if c < keys <= _MOST_CHUNKS * c or not c]


class _Items(NamedTuple):
    """Items of a head: their number, steps of all, steps of the longest, whether all are equal."""

    number: int
    steps: int
    longest: int
    equal: bool


@lru_cache(maxsize=64)
def _ranges(visibility: Visibility, rows: int) -> tuple[_Numbers, _Numbers, _Numbers]:
    """Return begin, end and count: the ranges of keys that q tiles see, and tiles of each range."""
    queries = visibility.seqlen_q
    if visibility.first is None and visibility.last is None:
        seen = {(0, visibility.seqlen_kv): ceil_div(queries, rows)}
    else:
        tiles = (visibility.keys_seen(q, min(q + rows, queries)) for q in range(0, queries, rows))
        seen = Counter(tiles)
    found = [(*keys, n) for keys, n in seen.items() if keys[0] < keys[1]]
    begin, end, number = np.array(found, np.int64).reshape(-1, 3).T
    return begin, end, number


@dataclass(frozen=True)
class ForwardWork:
    """The items of a forward pass in a tile and a chunk.

    Attributes
    ----------
    problem, limits
        The problem, and the limits of the device.
    block_q, block_kv
        The tile.
    blocks_per_sm
        Thread blocks of a multiprocessor.
    chunk
        Keys of a chunk; 0: all.
    """

    problem: AttentionProblem
    limits: DeviceLimits
    block_q: int
    block_kv: int
    blocks_per_sm: int
    chunk: int

    def time(self, step: StepTime) -> float:
        """Return the predicted time in microseconds."""
        items = self._items()
        heads = self.problem.batch * self.problem.heads_q
        count, slots = items.number * heads, self.limits.num_sms * self.blocks_per_sm
        together = ceil_div(min(count, slots), self.limits.num_sms)
        of_step = step.among(together, self.blocks_per_sm)
        rounds = ceil_div(count, slots)
        share = items.steps * heads / slots
        even = rounds * items.longest if items.equal else share + items.longest / 4
        work = max(even, items.longest) * of_step + _ITEM * max(rounds, 1)
        memory = self._bytes / _MEMORY
        if rounds > 1:
            memory *= 1 + _LOST_OF_ROUND * (rounds * slots / count - 1)
        return max(work, memory + _ITEM) + self._merging(count)

    def _items(self) -> _Items:
        """Return the items of a head."""
        begin, end, tiles = _ranges(self.problem.visibility, self.block_q)
        chunk = self.chunk or max(1, self.problem.seqlen_kv)
        first, last = begin // chunk, (end - 1) // chunk
        several, between = first < last, np.maximum(last - first - 1, 0)
        of_first = -(-(np.where(several, (first + 1) * chunk, end) - begin) // self.block_kv)
        of_last = -(-np.where(several, end - last * chunk, 0) // self.block_kv)
        of_others = np.where(between > 0, ceil_div(chunk, self.block_kv), 0)
        count = int((tiles * (1 + several + between)).sum())
        steps = int((tiles * (of_first + of_last + between * of_others)).sum())
        longest = max(int(n.max(initial=0)) for n in (of_first, of_last, of_others))
        return _Items(count, steps, longest, steps == longest * count)

    @property
    def _bytes(self) -> int:
        """Bytes of q, k, v and out, each read or written once."""
        problem = self.problem
        width = problem.batch * (problem.head_dim + problem.head_dim_v)
        of_q = problem.heads_q * problem.seqlen_q * DTYPES[problem.storage].itemsize
        of_kv = problem.heads_kv * problem.seqlen_kv * ELEMENTS[problem.stored].itemsize
        return width * (of_q + of_kv)

    def _merging(self, items: int) -> float:
        """Return the microseconds of writing the items' partial results and merging them."""
        if not self.chunk:
            return 0.0
        rows = min(self.block_q, self.problem.seqlen_q)
        size = DTYPES[self.problem.compute].itemsize
        return _MERGE + 2 * items * rows * self.problem.head_dim_v * size / _PARTS

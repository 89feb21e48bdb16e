"""How long a forward pass with few tiles would take: what a tile and a chunk are chosen by.

A pass that fills the device takes the first row of its table and whole rows of
keys. One that does not is reckoned for every row and several chunks, and the
shortest time is taken: ``bench/NOTES.md`` has the figures beside measured ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from .device import DeviceLimits
from .problem import DTYPES, AttentionProblem
from .step_time import StepTime
from .tiles.common import ceil_div

__all__ = ["ForwardWork", "chunks_to_try", "is_small"]

#: Keys of a chunk that are tried; 0: every row is walked whole.
CHUNKS = (0, *(1 << n for n in range(7, 21)))

#: Chunks of a row, at most, but where the longest is too short for it.
_MOST_CHUNKS = 64
#: Queries of a head up to which the first tile of the table may be much too tall.
_FEW_ROWS = 128

#: Bytes a microsecond that K and V are read with, and parts written and read again.
_MEMORY, _PARTS = 4.2e6, 1.2e6
#: Microseconds that a launch of ``merge`` takes, and an item before its first step and after its
#: last.
_MERGE, _ITEM = 4.0, 1.5
#: Of a round of blocks that is not full, how much of what it lacks is lost where memory is slow.
_LOST_OF_ROUND = 0.25


def is_small(problem: AttentionProblem, tiles: int, limits: DeviceLimits) -> bool:
    """Whether so many q tiles leave multiprocessors idle, or have few rows each."""
    idle = tiles < 2 * limits.num_sms
    return problem.has_pairs and (idle or problem.seqlen_q <= _FEW_ROWS)


def chunks_to_try(problem: AttentionProblem) -> list[int]:
    """Keys of a chunk, 0 among them: at most :data:`_MOST_CHUNKS` of a row."""
    keys = problem.seqlen_kv
    return [c for c in CHUNKS if c < keys <= _MOST_CHUNKS * c or not c]


@dataclass(frozen=True)
class ForwardWork:
    """The items of a forward pass in a tile and a chunk.

    Attributes
    ----------
    problem, limits
        What is computed, and where.
    block_q, block_kv
        The tile.
    blocks_per_sm
        Thread blocks of a multiprocessor.
    chunk
        Keys; 0: all.
    """

    problem: AttentionProblem
    limits: DeviceLimits
    block_q: int
    block_kv: int
    blocks_per_sm: int
    chunk: int

    def time(self, step: StepTime) -> float:
        """Microseconds."""
        steps = Counter[int]()
        for of_item, items in self._steps():
            steps[of_item] += items
        heads = self.problem.batch * self.problem.heads_q
        count, longest = steps.total() * heads, max(steps, default=0)
        slots = self.limits.num_sms * self.blocks_per_sm
        together = ceil_div(min(count, slots), self.limits.num_sms)
        of_step = step.among(together, self.blocks_per_sm)
        rounds = ceil_div(count, slots)
        share = sum(n * items for n, items in steps.items()) * heads / slots
        even = rounds * longest if len(steps) == 1 else share + longest / 4
        work = max(even, longest) * of_step + _ITEM * max(rounds, 1)
        memory = self._bytes / _MEMORY
        if rounds > 1:
            memory *= 1 + _LOST_OF_ROUND * (rounds * slots / count - 1)
        return max(work, memory + _ITEM) + self._merging(count)

    def _steps(self) -> Iterator[tuple[int, int]]:
        """Steps of an item of a head, and how many items have as many."""
        problem, chunk = self.problem, self.chunk or self.problem.seqlen_kv
        seen = problem.visibility.keys_seen
        for q_begin in range(0, problem.seqlen_q, self.block_q):
            begin, end = seen(q_begin, min(q_begin + self.block_q, problem.seqlen_q))
            if begin == end:
                continue
            first, last = begin // chunk, (end - 1) // chunk
            if first == last:
                yield ceil_div(end - begin, self.block_kv), 1
                continue
            yield ceil_div((first + 1) * chunk - begin, self.block_kv), 1
            yield ceil_div(chunk, self.block_kv), last - first - 1
            yield ceil_div(end - last * chunk, self.block_kv), 1

    @property
    def _bytes(self) -> int:
        """Of all arrays, each read or written once."""
        problem = self.problem
        width = problem.head_dim + problem.head_dim_v
        rows = problem.heads_q * problem.seqlen_q + problem.heads_kv * problem.seqlen_kv
        return problem.batch * rows * width * DTYPES[problem.storage].itemsize

    def _merging(self, items: int) -> float:
        """Of writing the parts of so many items, and merging them."""
        if not self.chunk:
            return 0.0
        rows = min(self.block_q, self.problem.seqlen_q)
        size = DTYPES[self.problem.compute].itemsize
        return _MERGE + 2 * items * rows * self.problem.head_dim_v * size / _PARTS

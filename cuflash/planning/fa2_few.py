"""Chooses chunks of keys for FlashAttention-2's forward pass for few queries.

Such a pass reads every key once and does little with it. Its time is predicted from the
bytes, from the number of blocks, and from the kernel that merges chunks:
``bench/NOTES.md`` compares predicted and measured times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .device import DeviceLimits
from .key_chunks import divides, may_split
from .problem import DTYPES, ELEMENTS, AttentionProblem
from .tiles.common import ceil_div
from .tiles.fa2_few import Fa2FewTile, merging_tile

__all__ = ["FewWork", "fastest_chunk", "in_one_block", "steadiest_chunk"]

#: The chunks that are tried, in keys; 0: keys are not split.
_CHUNKS = (0, *(1 << n for n in range(6, 21)))
#: Most chunks of a row, unless the longest chunk gives more.
_MOST_CHUNKS = 64

#: Bytes per microsecond of an H200: of all multiprocessors together, and of one alone, by the
#: bytes of a stored number.
_MEMORY, _ALONE = 4.5e6, {1: 0.034e6, 2: 0.064e6}
#: Where more than half of all multiprocessors have a block, but not all, blocks take longer than
#: either rate says: by up to this part of the time that one needs alone.
_CROWDED = 0.2
#: Beyond half of the multiprocessors this grows over the first of these shares of them (with chunks
#: that a block merges over the second), and falls to nothing over the last share.
_GROWS, _FALLS = {False: 0.04, True: 0.15}, 0.35
#: Microseconds of a launch, and of a chunk of eight rows that a block merges.
_LAUNCH, _CHUNK = 5.0, 0.75
#: Microseconds until a multiprocessor is busy again after a round of blocks. With 16-bit numbers
#: other multiprocessors use the memory meanwhile, so further rounds cost less.
_ROUND = {1: 4.0, 2: 3.3}
#: Microseconds of each row of a block beyond the first four: its warps' results are merged.
_ROW = 0.1
#: Microseconds of the kernel that merges, and of each chunk of a row beyond the first eight.
_MERGE, _MERGED_CHUNK = 3.0, 0.1
#: Bytes of partial results that a microsecond writes or reads.
_PARTS = 2.6e6


@dataclass(frozen=True)
class FewWork:
    """A pass in a chunk; 0: keys are not split.

    With ``merges`` a block merges the chunks of its rows, otherwise each chunk has a block.
    """

    problem: AttentionProblem
    limits: DeviceLimits
    tile: Fa2FewTile
    chunk: int
    merges: bool = False

    @property
    def time(self) -> float:
        """The predicted time in microseconds."""
        problem = self.problem
        chunks = ceil_div(self._keys, self.chunk) if self.chunk else 1
        blocks = max(1, self._tiles if self.merges else self._tiles * chunks)
        size = ELEMENTS[problem.stored].itemsize
        keys = self._keys if self.merges else min(self.chunk or self._keys, self._keys)
        read = (problem.head_dim + problem.head_dim_v) * size * keys  # by a block
        merging = chunks * _CHUNK * self.tile.result_rows / 8 if self.merges else 0.0
        rounds, others = divmod(blocks, self.limits.num_sms)
        main = rounds * self._round(self.limits.num_sms, read, size, merging)
        main += self._round(others, read, size, merging) if others else 0.0
        return _LAUNCH + main + self._between(size, blocks) + self._merging(blocks, chunks)

    def _round(self, blocks: int, read: float, size: int, merging: float) -> float:
        """Return the time of blocks that run at once, each of which reads so many bytes."""
        alone, busy = read / _ALONE[size], blocks / self.limits.num_sms
        crowded = max(0.0, min(1.0, (busy - 0.5) / _GROWS[self.merges], (1 - busy) / _FALLS))
        together = read * blocks / _MEMORY + _CROWDED * crowded * alone
        return max(alone + merging, together)

    def _between(self, size: int, blocks: int) -> float:
        """Return the time for which multiprocessors wait for the first keys of blocks."""
        further = ceil_div(blocks, self.limits.num_sms) - 1
        results = _ROW * max(0, self._rows - 4) * (further + 1)
        if size == 1:  # a full device waits for the first blocks too
            full = min(1.0, blocks / self.limits.num_sms)
            return results + _ROUND[size] * (further + full)
        return results + _ROUND[size] * math.sqrt(further)

    @property
    def _tiles(self) -> int:
        """Blocks of a chunk that have queries.

        With packed queries others begin and end at once; entries are taken to have equally many.
        """
        heads = max(1, self.tile.heads)
        parts = ceil_div(self._queries, self.tile.rows // heads)
        return self.problem.num_entries * self.problem.heads_q // heads * parts

    @property
    def _queries(self) -> int:
        """Queries of an entry."""
        return self.problem.usual_lengths[0]

    @property
    def _rows(self) -> int:
        """Rows of a block that are stored."""
        return min(self.tile.rows, self._queries * max(1, self.tile.heads))

    @property
    def _keys(self) -> int:
        """Keys that some query sees."""
        begin, end = self.problem.visibility.keys_seen(0, self.problem.seqlen_q)
        return max(1, end - begin)

    def _merging(self, blocks: int, chunks: int) -> float:
        if not self.chunk or self.merges:
            return 0.0
        size = DTYPES[self.problem.compute].itemsize
        parts = 2 * blocks * self._rows * self.problem.head_dim_v * size
        return _MERGE + _MERGED_CHUNK * max(0, chunks - 8) + parts / _PARTS


def fastest_chunk(problem: AttentionProblem, limits: DeviceLimits, tile: Fa2FewTile) -> int:
    """Return the chunk whose predicted time is the shortest; 0: keys are not split."""
    chunks = _chunks(problem, tile)
    return min(chunks, key=lambda chunk: FewWork(problem, limits, tile, chunk).time)


def steadiest_chunk(
    problem: AttentionProblem, limits: DeviceLimits, tile: Fa2FewTile, batches: Sequence[int]
) -> int:
    """Return the chunk that is nearly the fastest in all batches.

    For each batch its time is divided by the shortest, and the chunk has the least sum of
    the squares of these ratios. A batch takes a block for each chunk or one for all chunks
    of its rows.
    """
    chunks = _chunks(problem, tile)
    squares = dict.fromkeys(chunks, 0.0)
    for batch in batches:
        own = replace(problem, batch=batch)
        times = {chunk: FewWork(own, limits, tile, chunk).time for chunk in chunks}
        for chunk in chunks:
            if chunk and merging_tile(tile, limits, chunk) is not None:
                merging = FewWork(own, limits, tile, chunk, merges=True).time
                times[chunk] = min(times[chunk], merging)
        shortest = min(times.values())
        for chunk in chunks:
            squares[chunk] += (times[chunk] / shortest) ** 2
    return min(chunks, key=lambda chunk: squares[chunk])


def in_one_block(
    problem: AttentionProblem, limits: DeviceLimits, tile: Fa2FewTile, chunk: int
) -> Fa2FewTile | None:
    """Return the tile whose blocks merge chunks, if that is faster than a block for each chunk."""
    if not chunk or not problem.has_pairs:
        return None
    split, merging = (FewWork(problem, limits, tile, chunk, m).time for m in (False, True))
    return merging_tile(tile, limits, chunk) if merging < split else None


def _chunks(problem: AttentionProblem, tile: Fa2FewTile) -> list[int]:
    """Return the chunks to try, with 0."""
    keys = problem.seqlen_kv
    if not (may_split(problem) and problem.has_pairs):
        return [0]
    least = min(_CHUNKS[-1], ceil_div(keys, _MOST_CHUNKS))
    fitting = [c for c in _CHUNKS if least <= c < keys or not c]
    return [c for c in fitting if divides(c, tile.block_kv)]

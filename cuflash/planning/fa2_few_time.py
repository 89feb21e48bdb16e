"""Predicts the time of FlashAttention-2's forward pass for few queries.

Such a pass reads every key once and does little with it. Its time is predicted from the
bytes, from the number of blocks, and from what merges chunks of keys: ``bench/NOTES.md``
compares predicted and measured times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from .device import DeviceLimits
from .problem import DTYPES, ELEMENTS, AttentionProblem
from .tiles.common import ceil_div
from .tiles.fa2_few import ROWS, Fa2FewTile

__all__ = ["FewWork"]

#: Bytes per microsecond of an H200: of all multiprocessors together, and of one alone, by the
#: bytes of a stored number.
_MEMORY, _ALONE = 4.44e6, {1: 0.034e6, 2: 0.078e6}
#: Of that of one alone, the part that blocks with two fragments of rows reach. In float8 the
#: conversions take longer than the products.
_WIDE = {1: 1.0, 2: 0.7}
#: Bytes per microsecond from L2, if blocks that read the same keys run in several rounds. In one
#: round they run beside each other, and the rates of the memory count.
_SHARED = 7.5e6
#: Microseconds until a block has its first keys, where the rounds' time does not hold it.
_BEGIN = {1: 0.0, 2: 0.5}
#: Microseconds of a launch.
_LAUNCH = 5.7
#: Microseconds of a chunk that a block merges, and of each row of 128 columns in it.
_CHUNK, _CHUNK_ROW = {1: 0.0, 2: 0.65}, {1: 0.09, 2: 0.116}
#: Microseconds until a multiprocessor is busy again after a round of blocks. With 16-bit numbers
#: other multiprocessors use the memory meanwhile, so further rounds cost less.
_ROUND = {1: 4.0, 2: 2.3}
#: Microseconds of each row of a block beyond the first four: its warps' results are merged.
_ROW = 0.07
#: Microseconds of the kernel that merges, and of each chunk of a row beyond the first eight.
_MERGE, _MERGED_CHUNK = 1.94, 0.1
#: Bytes of partial results that a microsecond writes or reads.
_PARTS = 1.56e6


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
        sms, chunks, blocks = self.limits.num_sms, self._chunks, self.blocks
        rounds, others = divmod(blocks, sms)
        main = rounds * self._round(sms)
        main += self._round(others, rounds) if others else 0.0
        if blocks > sms and self._sharing > 1:
            main = max(main, self._read * blocks / _SHARED)
        return _LAUNCH + main + self._between(blocks) + self._merging(blocks, chunks)

    @cached_property
    def blocks(self) -> int:
        """Blocks that have queries, and a chunk or all keys of their rows."""
        return max(1, self._tiles if self.merges else self._tiles * self._chunks)

    def _round(self, blocks: int, before: int = 0) -> float:
        """Return the time of blocks that run at once, after so many full rounds.

        Later blocks begin at different times, so that rounds hide a part of what one of the
        last blocks needs alone.
        """
        wide = _WIDE[self._size] if self.tile.rows > ROWS else 1.0
        alone = _BEGIN[self._size] + self._read / (wide * _ALONE[self._size])
        alone += self._merged_inside
        memory = self._read * blocks / self._sharing / _MEMORY
        if not before:
            return max(memory, alone)
        idle = 1 - blocks / self.limits.num_sms
        return memory + idle * alone / (1 + before)

    def _between(self, blocks: int) -> float:
        """Return the time for which multiprocessors wait for the first keys of blocks."""
        further = ceil_div(blocks, self.limits.num_sms) - 1
        results = _ROW * max(0, self._rows - 4) * (further + 1)
        if self._size == 1:  # a full device waits for the first blocks too
            full = min(1.0, blocks / self.limits.num_sms)
            return results + _ROUND[self._size] * (further + full)
        return results + _ROUND[self._size] * math.sqrt(further)

    @cached_property
    def _size(self) -> int:
        """Bytes of a stored number."""
        return ELEMENTS[self.problem.stored].itemsize

    @cached_property
    def _chunks(self) -> int:
        return ceil_div(self._keys, self.chunk) if self.chunk else 1

    @cached_property
    def _read(self) -> int:
        """Bytes that a block reads."""
        keys = self._keys if self.merges else min(self.chunk or self._keys, self._keys)
        return (self.problem.head_dim + self.problem.head_dim_v) * self._size * keys

    @property
    def _merged_inside(self) -> float:
        """The time for which a block merges chunks."""
        if not self.merges:
            return 0.0
        row = _CHUNK_ROW[self._size] * self.problem.head_dim_v / 128
        return self._chunks * (_CHUNK[self._size] + row * self.tile.result_rows)

    @cached_property
    def _parts(self) -> int:
        """Blocks that share the queries of a kv head's heads."""
        return ceil_div(self._queries, self.tile.rows // max(1, self.tile.heads))

    @cached_property
    def _tiles(self) -> int:
        """Blocks of a chunk that have queries.

        With packed queries others begin and end at once; entries are taken to have equally many.
        """
        heads = self.problem.heads_q // max(1, self.tile.heads)
        return self.problem.num_entries * heads * self._parts

    @cached_property
    def _sharing(self) -> int:
        """Blocks that read the same keys."""
        return max(1, self.problem.group // max(1, self.tile.heads) * self._parts)

    @property
    def _queries(self) -> int:
        """Queries of an entry."""
        return self.problem.usual_lengths[0]

    @property
    def _rows(self) -> int:
        """Rows of a block that are stored."""
        return min(self.tile.rows, self._queries * max(1, self.tile.heads))

    @cached_property
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

"""The call's arrays for a few heads, in the compute dtype and in folded rows.

The query heads that share a kv head are folded into the rows: one matrix product then serves the
group without a second copy of its keys, and sums the group's gradients. Folded rows are ordered by
block of queries and, within a block, by head of the group, so a block is one slice of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..features.host import ScorePlace
from .blocks import Array, Blocks, Tile

__all__ = ["Heads"]


class Heads:
    """Some pairs of a batch entry and a kv head, computed together.

    Arrays of the call are (batch, seqlen, heads, width), statistics (batch,
    heads_q, seqlen_q). Here "batch" and "head" count the pairs of this object.
    """

    def __init__(self, blocks: Blocks, batch: slice, heads: slice) -> None:
        self._blocks = blocks
        self._batch, self._heads = batch, heads

    @classmethod
    def of(cls, blocks: Blocks, most_entries: int | None = None) -> Iterator[Heads]:
        """All pairs of a problem, at most ``block_heads`` at a time, of at most so many entries."""
        batch, heads = blocks.problem.batch, blocks.problem.heads_kv
        together = blocks.tile.block_heads
        entries = max(1, together // max(1, heads))
        entries = min(entries, most_entries or entries)
        for entry in range(0, batch, entries):
            for head in range(0, heads, together):
                yield cls(blocks, slice(entry, entry + entries), slice(head, head + together))

    @property
    def entries(self) -> slice:
        """The entries of the batch."""
        return slice(*self._batch.indices(self._blocks.problem.batch)[:2])

    @property
    def query_heads(self) -> slice:
        """The heads of the queries."""
        problem = self._blocks.problem
        start, stop, _ = self._heads.indices(problem.heads_kv)
        return slice(start * problem.group, stop * problem.group)

    def keys(self, array: Array) -> Array:
        """Keys or values, (batch, head, key, width), in a form that BLAS reads.

        It is a copy only if the dtype or the strides need one; in a copy, keys that no query sees
        are undefined.
        """
        part: Array = array[self._batch, :, self._heads].swapaxes(1, 2)
        if part.dtype == self._blocks.compute and _is_matrix(part):
            return part
        seen, copied = self._blocks.seen_keys, np.empty(part.shape, self._blocks.compute)
        copied[:, :, seen] = part[:, :, seen]
        return copied

    def part(self, blocks: Blocks) -> Heads:
        """The same heads with the rows of some of the blocks."""
        return Heads(blocks, self._batch, self._heads)

    def finite(self, array: Array) -> Array:
        """Whether the queries of each (batch, head) are free of infinities and NaN."""
        found: Array = np.asarray(np.isfinite(self._by_group(array)).all(axis=(2, 3, 4)))
        return found

    def set_keys(self, array: Array, keys: slice, values: Array) -> None:
        """Write a block of (batch, head, key, width) to its destination, rounding once."""
        array[self._batch, keys, self._heads] = values.swapaxes(1, 2)

    def rows(self, array: Array) -> Array:
        """Folded rows (batch, head, row, width): a copy."""
        return self._fold(self._by_group(array))

    def set_rows(self, array: Array, rows: Array) -> None:
        """Write all folded rows to their destination, rounding once."""
        self._unfold(rows, self._by_group(array))

    def statistics(self, array: Array) -> Array:
        """Folded statistics (batch, head, row): a copy."""
        return self._fold(self._statistics_by_group(array))

    def set_statistics(self, array: Array, rows: Array) -> None:
        """Write all folded statistics to their destination."""
        self._unfold(rows, self._statistics_by_group(array))

    def sinks(self, sinks: Array) -> Array:
        """The sink (heads_q,) of every row, (batch, head, row); infinite ones give NaN."""
        problem = self._blocks.problem
        everywhere = (problem.batch, problem.heads_q, problem.seqlen_q)
        rows = self.statistics(np.broadcast_to(sinks[:, None], everywhere))
        rows[rows == np.inf] = np.nan
        return rows

    def place(self, tile: Tile) -> ScorePlace:
        """Entries, heads, queries and keys of a tile's scores."""
        problem = self._blocks.problem
        heads = np.arange(problem.heads_q).reshape(self._split(problem.heads_q))[self._heads]
        return ScorePlace(
            np.arange(problem.batch)[self._batch, None, None, None, None],
            heads[:, None, :, None][None],
            np.arange(tile.queries.start, tile.queries.stop),
            np.arange(tile.keys.start, tile.keys.stop)[:, None, None],
        )

    def dead(self) -> Array | None:
        """The rows (batch, head, row) that see no key; None if every row sees one."""
        live, runs = self._blocks.live_queries, self._runs()
        if not runs or (live.start <= runs[0].start and runs[-1].stop <= live.stop):
            return None
        problem = self._blocks.problem
        everywhere = (problem.batch, problem.heads_q, problem.seqlen_q)
        query = np.arange(problem.seqlen_q)
        dead = (query < live.start) | (query >= live.stop)
        rows: Array = self.statistics(np.broadcast_to(dead, everywhere)) != 0
        return rows

    def _by_group(self, array: Array) -> Array:
        """A view (batch, head, head of the group, query, width)."""
        batch, seqlen, heads, width = array.shape
        split: Array = array.reshape(batch, seqlen, *self._split(heads), width)
        grouped: Array = split[self._batch, :, self._heads].transpose(0, 2, 3, 1, 4)
        return grouped

    def _statistics_by_group(self, array: Array) -> Array:
        batch, heads, seqlen = array.shape
        split: Array = array.reshape(batch, *self._split(heads), seqlen)
        return split[self._batch, self._heads]

    def _split(self, heads: int) -> tuple[int, int]:
        """The two sizes that one axis splits into; such a split is always a view."""
        heads_kv = self._blocks.problem.heads_kv
        return heads_kv, heads // heads_kv

    def _fold(self, grouped: Array) -> Array:
        batch, heads, group, _, *width = grouped.shape
        runs = self._runs()
        length = sum(queries.stop - queries.start for queries in runs)
        rows = np.empty((batch, heads, group * length, *width), self._blocks.compute)
        for queries in runs:
            self._run_of(rows, queries)[...] = grouped[:, :, :, queries]
        return rows

    def _unfold(self, rows: Array, grouped: Array) -> None:
        for queries in self._runs():
            grouped[:, :, :, queries] = self._run_of(rows, queries)

    def _runs(self) -> list[slice]:
        """Runs of queries whose heads follow one another in the rows; one run for single heads."""
        queries = self._blocks.queries
        if self._blocks.problem.group == 1 and queries:
            return [slice(queries[0].start, queries[-1].stop)]
        return queries

    def _run_of(self, rows: Array, queries: slice) -> Array:
        """The folded rows of a run, as a view with the heads of the group as an axis."""
        batch, heads, _, *width = rows.shape
        length = queries.stop - queries.start
        part = rows[:, :, self._blocks.rows(queries)]
        return part.reshape(batch, heads, self._blocks.problem.group, length, *width)


def _is_matrix(array: Array) -> bool:
    """Whether the last two axes are rows of unit stride that do not overlap."""
    rows, width = array.shape[-2:]
    row_stride, stride = array.strides[-2:]
    side_by_side = row_stride >= width * array.itemsize and row_stride % array.itemsize == 0
    return array.flags.aligned and stride == array.itemsize and (rows <= 1 or side_by_side)

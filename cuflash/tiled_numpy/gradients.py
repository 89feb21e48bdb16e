"""The backward pass: both papers loop over blocks of keys, and inside over blocks of queries.

They differ in when delta = rowsum(dO * O) is computed; see the modules of the algorithms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np

from ..planning.plan import Plan
from .blocks import Array, Blocks, Tile
from .gradient_rows import ByRow, Given, GradientRows
from .heads import Heads
from .key_sums import KeySums
from .operands import Operands
from .own_lse import own_lse
from .steps import accumulate, sum_over_keys, transposed_product
from .terms import terms_of
from .threads import Task

__all__ = ["ByRow", "Given", "GradientRows", "Gradients", "tasks"]


#: An algorithm's computation for the rows of a task.
Inner = Callable[["Gradients", GradientRows], None]


def tasks(plan: Plan, inner: Inner, given: Given, by_row: ByRow) -> Iterator[Task]:
    """The tasks of a backward pass: each has some heads and a part of their queries.

    The contributions of every row go to the arrays of ``by_row``.
    """
    blocks = Blocks(plan)
    live, terms = blocks.live(given.q), terms_of(plan.problem, given.more)
    for heads in Heads.of(blocks):
        operands = Operands(blocks, heads, live, given.k, given.v, terms)
        parts = blocks.parts()
        sums = KeySums(heads, blocks.keys, len(parts), given.dk, given.dv)
        for index, part in enumerate(parts):
            task = Gradients(part, heads.part(part), operands)
            yield functools.partial(task.run, inner, given, by_row, sums, index)


class Gradients:
    """One task: dQ of a part of the queries, and their contributions to dK and dV."""

    def __init__(self, blocks: Blocks, heads: Heads, operands: Operands) -> None:
        self._blocks, self._heads, self._operands = blocks, heads, operands

    def load(self, given: Given) -> GradientRows:
        """The rows of the task, with the log-sum-exp of its scores; runs in the task's thread."""
        blocks, operands = self._blocks, self._operands.make()
        self._scratch = blocks.scratch
        rows = GradientRows.load(blocks, self._heads, given)
        if operands.common is not None:
            own = own_lse(blocks, operands, rows.scaled_q, self._scratch)
            rows.take_off(operands.common, own)
        return rows

    def run(self, inner: Inner, given: Given, by_row: ByRow, sums: KeySums, index: int) -> None:
        """Compute and write all wanted gradients."""
        self._sums, self._index = sums, index
        rows, blocks, operands = self.load(given), self._blocks, self._operands
        if by_row.sinks is not None and rows.sinks is not None:
            self._heads.set_statistics(by_row.sinks, rows.of_sinks())
        if by_row.pairs is not None:
            rows.pairs = np.zeros_like(rows.lse)
        if any(array is not None for array in (given.dq, given.dk, given.dv, rows.pairs)):
            inner(self, rows)
        if by_row.pairs is not None and rows.pairs is not None:
            self._heads.set_statistics(by_row.pairs, rows.pairs)
        if given.dq is not None:
            rows.store(blocks, self._heads, given.dq, operands.common)

    def dscores(self, tile: Tile, rows: GradientRows, delta: Array) -> Array:
        """The dS of a tile before slopes, [key, row]; 0 where P is 0, whatever dP is."""
        keys = self._operands.keys[:, :, tile.keys]
        weights, _ = self._weights(tile, rows, keys)
        dscores = self._dscores(tile, rows, delta, weights, self._operands.kept(tile))
        np.copyto(dscores, 0, where=weights == 0)
        return dscores

    def column_blocks(self, rows: GradientRows, delta_of: Callable[[slice], Array]) -> None:
        """Pass on dK and dV block by block, and accumulate dQ over the blocks.

        dK and dV of a block are local to the inner loop. Heads of a group are folded into the rows,
        so these sums include the group.
        """
        for number, block in enumerate(self._blocks.keys):
            whole = self._sums.start(self._operands, block)
            for index, tile in enumerate(self._blocks.of_keys(block)):
                seen = slice(tile.keys.start - block.start, tile.keys.stop - block.start)
                dk, dv = (None if array is None else array[:, :, seen] for array in whole)
                self._tile(tile, rows, delta_of, (dk, dv), index == 0)
            self._sums.add(self._index, number, whole)

    def _tile(
        self,
        tile: Tile,
        rows: GradientRows,
        delta_of: Callable[[slice], Array],
        sums: tuple[Array | None, Array | None],
        first: bool,
    ) -> None:
        dk, dv = sums
        scratch, keys = self._scratch, self._operands.keys[:, :, tile.keys]
        weights, slopes = self._weights(tile, rows, keys)
        kept = self._operands.kept(tile)
        if dv is not None:
            left = weights
            if kept is not None:
                left = scratch.array("left", weights.shape)
                left[...] = weights
                self._drop(left, kept)
            accumulate(dv, left, rows.dout[:, :, tile.rows], scratch, first)
        if dk is None and rows.dq is None and rows.pairs is None:
            return
        dscores = self._dscores(tile, rows, delta_of(tile.rows), weights, kept)
        if rows.pairs is not None:
            rows.pairs[:, :, tile.rows] += self._operands.sums_of_pairs(dscores, tile)
        if slopes is not None:
            np.multiply(dscores, slopes, out=dscores, where=dscores != 0)
            rows.clear_dead(dscores, tile)
        if dk is not None:
            accumulate(dk, dscores, rows.scaled_q[:, :, tile.rows], scratch, first)
        if rows.dq is None:
            return
        if rows.sums is not None:
            rows.sums[:, :, tile.rows] += sum_over_keys(dscores)
        dq = rows.dq[:, :, tile.rows]
        accumulate(dq, dscores.swapaxes(-1, -2), keys, scratch, tile.first)

    def _weights(self, tile: Tile, rows: GradientRows, keys: Array) -> tuple[Array, Array | None]:
        """P^T of a tile, [key, row]: exp(S - lse), and 0 in dead rows; and the slopes of S."""
        scaled_q = rows.scaled_q[:, :, tile.rows]
        weights = transposed_product(keys, scaled_q, self._scratch, "weights")
        slopes = self._operands.change_with_slopes(weights, tile)
        weights -= rows.lse[:, :, None, tile.rows]
        np.exp(weights, out=weights)
        rows.clear_dead(weights, tile)
        return weights, slopes

    def _drop(self, pairs: Array, kept: Array) -> None:
        """Clear dropped weights or their gradients, [key, row], and scale the others."""
        pairs *= self._operands.inverse_keep
        np.copyto(pairs, 0, where=~kept)

    def _dscores(
        self, tile: Tile, rows: GradientRows, delta: Array, weights: Array, kept: Array | None
    ) -> Array:
        """P * (dP - delta) of a tile, [key, row]: dS^T before slopes; 0 in dead rows."""
        values, dout = self._operands.values[:, :, tile.keys], rows.dout[:, :, tile.rows]
        dscores = transposed_product(values, dout, self._scratch, "dscores")
        if kept is not None:
            self._drop(dscores, kept)
        dscores -= delta[:, :, None]
        dscores *= weights
        rows.clear_dead(dscores, tile)
        return dscores

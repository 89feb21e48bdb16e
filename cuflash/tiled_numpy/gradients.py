"""The backward pass: both papers loop over blocks of keys, and inside over blocks of queries.

They differ in when delta = rowsum(dO * O) is computed, which is what the
algorithms' modules say.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np

from ..planning.plan import Plan
from .blocks import Array, Blocks, Tile
from .gradient_rows import Given, GradientRows
from .heads import Heads
from .key_sums import KeySums
from .operands import Operands
from .own_lse import own_lse
from .steps import accumulate, sum_over_keys, transposed_product
from .threads import Task

__all__ = ["Given", "GradientRows", "Gradients", "tasks"]


#: What an algorithm does with the rows of a task.
Inner = Callable[["Gradients", GradientRows], None]


def tasks(plan: Plan, inner: Inner, given: Given) -> Iterator[Task]:
    """The tasks of a backward pass: some heads and a part of their queries each."""
    blocks = Blocks(plan)
    live = blocks.live(given.q)
    for heads in Heads.of(blocks):
        operands = Operands(blocks, heads, live, given.k, given.v)
        parts = blocks.parts()
        sums = KeySums(heads, blocks.keys, len(parts), given.dk, given.dv)
        for index, part in enumerate(parts):
            task = Gradients(part, heads.part(part), operands, sums, index)
            yield functools.partial(task.run, inner, given)


class Gradients:
    """One task: dQ of a part of the queries, and what they give to dK and dV."""

    def __init__(
        self, blocks: Blocks, heads: Heads, operands: Operands, sums: KeySums, index: int
    ) -> None:
        self._blocks, self._heads = blocks, heads
        self._operands, self._sums, self._index = operands, sums, index

    def run(self, inner: Inner, given: Given) -> None:
        """Compute and write everything."""
        blocks, operands = self._blocks, self._operands.make()
        self._scratch = blocks.scratch
        rows = GradientRows.load(blocks, self._heads, given)
        if operands.common is not None:
            own = own_lse(blocks, operands.keys, rows.scaled_q, self._scratch)
            rows.take_off(operands.common, own)
        inner(self, rows)
        rows.store(blocks, self._heads, given.dq, operands.common)

    def column_blocks(self, rows: GradientRows, delta_of: Callable[[slice], Array]) -> None:
        """Hand over dK and dV block by block, and accumulate dQ over the blocks.

        dK and dV of a block are local to the inner loop. Heads of a group are
        folded into the rows, so these sums are over the group too.
        """
        keys, values = self._operands.keys, self._operands.values
        for number, block in enumerate(self._blocks.keys):
            shape = (*keys.shape[:2], block.stop - block.start)
            dk = np.zeros((*shape, keys.shape[-1]), keys.dtype)
            dv = np.zeros((*shape, values.shape[-1]), keys.dtype)
            for index, tile in enumerate(self._blocks.of_keys(block)):
                seen = slice(0, tile.keys.stop - tile.keys.start)
                sums = dk[:, :, seen], dv[:, :, seen]
                self._tile(tile, rows, delta_of(tile.rows), sums, index == 0)
            self._sums.add(self._index, number, dk, dv)

    def _tile(
        self,
        tile: Tile,
        rows: GradientRows,
        delta: Array,
        sums: tuple[Array, Array],
        first: bool,
    ) -> None:
        dk, dv = sums
        scratch, keys = self._scratch, self._operands.keys[:, :, tile.keys]
        weights, dscores = self._weights(tile, rows, delta, keys)
        accumulate(dv, weights, rows.dout[:, :, tile.rows], scratch, first)
        accumulate(dk, dscores, rows.scaled_q[:, :, tile.rows], scratch, first)
        if rows.sums is not None:
            rows.sums[:, :, tile.rows] += sum_over_keys(dscores)
        dq = rows.dq[:, :, tile.rows]
        accumulate(dq, dscores.swapaxes(-1, -2), keys, scratch, tile.keys.start == 0)

    def _weights(
        self, tile: Tile, rows: GradientRows, delta: Array, keys: Array
    ) -> tuple[Array, Array]:
        """P^T and dS^T of a tile, [key, row]: exp(S - lse) and P * (dP - delta)."""
        scratch, values = self._scratch, self._operands.values[:, :, tile.keys]
        weights = transposed_product(keys, rows.scaled_q[:, :, tile.rows], scratch, "weights")
        self._blocks.hide(weights, tile)
        weights -= rows.lse[:, :, None, tile.rows]
        np.exp(weights, out=weights)
        dscores = transposed_product(values, rows.dout[:, :, tile.rows], scratch, "dscores")
        dscores -= delta[:, :, None]
        dscores *= weights
        if rows.some_dead:
            dead = rows.dead[:, :, None, tile.rows]
            np.copyto(weights, 0, where=dead)
            np.copyto(dscores, 0, where=dead)
        return weights, dscores

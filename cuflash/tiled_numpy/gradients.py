"""The backward pass: both papers loop over blocks of keys, and inside over blocks of queries.

They differ in when delta = rowsum(dO * O) is computed, which is what the
algorithms' modules say.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ..planning.plan import Plan
from .blocks import Array, Blocks, Scratch, Tile
from .common_part import row_shift
from .heads import Heads
from .key_sums import KeySums
from .operands import Operands
from .steps import accumulate, transposed_product
from .threads import Task

__all__ = ["Given", "GradientRows", "Gradients", "tasks"]


@dataclass(frozen=True)
class Given:
    """The arrays of the call."""

    dout: Array
    q: Array
    k: Array
    v: Array
    out: Array
    lse: Array
    dlse: Array | None
    dq: Array
    dk: Array
    dv: Array


@dataclass
class GradientRows:
    """Folded rows of the inputs that queries index, and of dQ; (batch, head, row, ...)."""

    scaled_q: Array
    dout: Array
    out: Array
    lse: Array  # of scores without the keys' common part
    dlse: Array | None
    dead: Array
    some_dead: bool
    dq: Array  # less the factor scale, and less what the common part of the keys gives

    @classmethod
    def load(
        cls, blocks: Blocks, heads: Heads, given: Given, common: Array | None
    ) -> GradientRows:
        """Copies in the compute dtype, with zeros in dead rows: whatever those hold is not read."""
        scaled_q, dout, lse = heads.rows(given.q), heads.rows(given.dout), heads.statistics(given.lse)
        scaled_q *= blocks.problem.scale
        dead = lse == -np.inf
        some_dead = bool(dead.any())
        if some_dead:
            scaled_q[dead] = 0
            dout[dead] = 0
        if common is not None:
            lse = (lse - row_shift(scaled_q, common)).astype(lse.dtype)
        return cls(
            scaled_q=scaled_q,
            dout=dout,
            out=heads.rows(given.out),
            lse=lse,
            dlse=None if given.dlse is None else heads.statistics(given.dlse),
            dead=dead,
            some_dead=some_dead,
            dq=np.zeros_like(scaled_q),
        )

    def delta(self, rows: slice) -> Array:
        """rowsum(dO * O) - dlse of some rows."""
        delta: Array = np.einsum("bhrw,bhrw->bhr", self.dout[:, :, rows], self.out[:, :, rows])
        if self.dlse is not None:
            delta -= self.dlse[:, :, rows]
        return delta

    def store(self, blocks: Blocks, heads: Heads, dq: Array, common: Array | None) -> None:
        """Write dQ to its place.

        dS of a row adds up to its dlse, which is what the common part of the keys is
        multiplied by.
        """
        if common is not None and self.dlse is not None:
            self.dq += self.dlse[..., None] * common
        self.dq *= blocks.problem.scale
        if self.some_dead:
            self.dq[self.dead] = 0
        heads.set_rows(dq, self.dq)


#: What an algorithm does with the rows of a task.
Inner = Callable[["Gradients", GradientRows], None]


def tasks(plan: Plan, inner: Inner, given: Given) -> Iterator[Task]:
    """The tasks of a backward pass: some heads and a part of their queries each."""
    blocks = Blocks(plan)
    for heads in Heads.of(blocks):
        operands = Operands(blocks, heads, given.q, given.k, given.v)
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
        self._scratch = Scratch(blocks.compute)

    def run(self, inner: Inner, given: Given) -> None:
        """Compute and write everything."""
        common = self._operands.make().common
        rows = GradientRows.load(self._blocks, self._heads, given, common)
        inner(self, rows)
        rows.store(self._blocks, self._heads, given.dq, common)

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

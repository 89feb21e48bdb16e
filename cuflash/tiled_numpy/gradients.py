"""The backward pass: both papers loop over blocks of keys, and inside over blocks of queries.

They differ in when delta = rowsum(dO * O) is computed, which is what the
algorithms' modules say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .blocks import Array, Blocks, Scratch, Tile
from .heads import Heads
from .steps import accumulate, transposed_product

__all__ = ["GradientRows", "column_blocks"]


@dataclass
class GradientRows:
    """Folded rows of the inputs that queries index, and of dQ; (batch, head, row, ...)."""

    scaled_q: Array
    dout: Array
    out: Array
    lse: Array
    dlse: Array | None
    dead: Array
    dq: Array  # less the factor scale

    @classmethod
    def load(
        cls,
        blocks: Blocks,
        heads: Heads,
        dout: Array,
        q: Array,
        out: Array,
        lse: Array,
        dlse: Array | None,
    ) -> GradientRows:
        """Copies in the compute dtype, with zeros in dead rows: whatever those hold is not read."""
        scaled_q, dout_rows, lse_rows = heads.rows(q), heads.rows(dout), heads.statistics(lse)
        scaled_q *= blocks.problem.scale
        dead = lse_rows == -np.inf
        if dead.any():
            scaled_q[dead] = 0
            dout_rows[dead] = 0
        return cls(
            scaled_q=scaled_q,
            dout=dout_rows,
            out=heads.rows(out),
            lse=lse_rows,
            dlse=None if dlse is None else heads.statistics(dlse),
            dead=dead,
            dq=np.zeros_like(scaled_q),
        )

    def delta(self, rows: slice) -> Array:
        """rowsum(dO * O) - dlse of some rows."""
        delta: Array = np.einsum("bhrw,bhrw->bhr", self.dout[:, :, rows], self.out[:, :, rows])
        if self.dlse is not None:
            delta -= self.dlse[:, :, rows]
        return delta

    def store(self, blocks: Blocks, heads: Heads, dq: Array) -> None:
        """Write dQ to its place."""
        self.dq *= blocks.problem.scale
        if self.dead.any():
            self.dq[self.dead] = 0
        for queries in blocks.queries:
            heads.set_rows(dq, queries, self.dq[:, :, blocks.rows(queries)])


def column_blocks(
    blocks: Blocks,
    heads: Heads,
    rows: GradientRows,
    delta_of: Callable[[slice], Array],
    k: Array,
    v: Array,
    dk: Array,
    dv: Array,
    scratch: Scratch,
) -> None:
    """Write dK and dV block by block, and accumulate dQ over the blocks.

    dK and dV of a block are local to the inner loop. Heads of a group are
    folded into the rows, so these sums are over the group too.
    """
    keys, values = heads.keys(k), heads.keys(v)
    for block in blocks.keys:
        shape = (*keys.shape[:2], block.stop - block.start)
        block_dk = np.zeros((*shape, keys.shape[-1]), keys.dtype)
        block_dv = np.zeros((*shape, values.shape[-1]), keys.dtype)
        for index, tile in enumerate(blocks.of_keys(block)):
            operands = keys[:, :, tile.keys], values[:, :, tile.keys]
            weights, dscores = _tile(blocks, tile, rows, delta_of(tile.rows), *operands, scratch)
            seen = slice(0, tile.keys.stop - tile.keys.start)
            dout, scaled_q = rows.dout[:, :, tile.rows], rows.scaled_q[:, :, tile.rows]
            accumulate(block_dv[:, :, seen], weights, dout, scratch, index == 0)
            accumulate(block_dk[:, :, seen], dscores, scaled_q, scratch, index == 0)
            dq = rows.dq[:, :, tile.rows]
            accumulate(dq, dscores.swapaxes(-1, -2), operands[0], scratch, block.start == 0)
        heads.set_keys(dk, block, block_dk)
        heads.set_keys(dv, block, block_dv)


def _tile(
    blocks: Blocks,
    tile: Tile,
    rows: GradientRows,
    delta: Array,
    k: Array,
    v: Array,
    scratch: Scratch,
) -> tuple[Array, Array]:
    """P^T and dS^T of a tile, [key, row]: exp(S - lse) and P * (dP - delta)."""
    weights = transposed_product(k, rows.scaled_q[:, :, tile.rows], scratch, "weights")
    blocks.hide(weights, tile)
    weights -= rows.lse[:, :, None, tile.rows]
    np.exp(weights, out=weights)
    dscores = transposed_product(v, rows.dout[:, :, tile.rows], scratch, "dscores")
    dscores -= delta[:, :, None]
    dscores *= weights
    dead = rows.dead[:, :, None, tile.rows]
    if dead.any():
        np.copyto(weights, 0, where=dead)
        np.copyto(dscores, 0, where=dead)
    return weights, dscores

"""FlashAttention-1 in NumPy (Dao et al. 2022)."""

from __future__ import annotations

import numpy as np

from .blocks import Array, Blocks, Scratch, Tile
from .gradients import GradientRows, Gradients
from .operands import Operands
from .steps import RowState, multiply, online_softmax, transposed_product

__all__ = ["backward", "forward"]


def forward(blocks: Blocks, operands: Operands, scaled_q: Array, state: RowState) -> None:
    """Algorithms 1 and 2: blocks of keys outside, blocks of queries inside.

    O, l and m of all rows are kept between a row's tiles; O is normalised after each tile.
    """
    scratch = blocks.scratch
    for block in blocks.keys:
        for tile in blocks.of_keys(block):
            scores = transposed_product(
                operands.keys[:, :, tile.keys], scaled_q[:, :, tile.rows], scratch, "scores"
            )
            operands.change(scores, tile)
            _join(scores, operands, tile, state.part(tile.rows), scratch)


def _join(scores: Array, operands: Operands, tile: Tile, state: RowState, scratch: Scratch) -> None:
    """Algorithm 1, lines 10 to 13: O = (l_old e^(m_old - m) O + P V) / l.

    Weights are relative to the new maximum from the start, which saves the second factor of line
    12. Weights that dropout removes from P (Algorithm 2, line 14) still count in l.
    """
    share = state.row_sum.copy()
    share *= online_softmax(scores, state)
    operands.drop(scores, tile)
    divisor = np.where(state.row_sum == 0, 1, state.row_sum)  # rows that are dead so far stay 0
    share /= divisor
    product = scratch.array("product", state.out.shape)
    multiply(scores.swapaxes(-1, -2), operands.values[:, :, tile.keys], product, scratch)
    product /= divisor[..., None]
    state.out *= share[..., None]
    state.out += product


def backward(gradients: Gradients, rows: GradientRows) -> None:
    """Algorithm 4: delta is recomputed in every tile (line 19), from O and dO.

    P comes from lse = m + log l, the only statistic that a call passes on.
    """
    gradients.column_blocks(rows, rows.delta)

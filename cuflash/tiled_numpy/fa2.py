"""FlashAttention-2 in NumPy (Dao 2023)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..planning.tiles.host import FEW_ROWS
from .blocks import Array, Blocks, Scratch
from .few_rows import few_rows_block
from .gradients import GradientRows, Gradients
from .operands import Operands, longest_norm
from .steps import RowState, accumulate, online_softmax, sum_over_keys, transposed_product

__all__ = ["backward", "forward"]

#: With fewer rows, measuring keys and values costs more than the maxima do.
_ROWS_TO_MEASURE = 256


def forward(blocks: Blocks, operands: Operands, scaled_q: Array, state: RowState) -> None:
    """Algorithm 1: blocks of queries outside, blocks of keys inside."""
    scratch = blocks.scratch
    block = _block_for(blocks, scaled_q, operands)
    for queries in blocks.queries:
        rows = blocks.rows(queries)
        block(blocks, queries, scaled_q[:, :, rows], operands, state.part(rows), scratch)


def _block_for(blocks: Blocks, scaled_q: Array, operands: Operands) -> Callable[..., None]:
    """The function that computes a block of these rows."""
    if blocks.tile.block_q * blocks.problem.group <= FEW_ROWS:
        return few_rows_block
    many = scaled_q.shape[2] >= _ROWS_TO_MEASURE
    if many and longest_norm(scaled_q) <= operands.longest_row:
        return _small_block
    return _block


def _block(
    blocks: Blocks,
    queries: slice,
    scaled_q: Array,
    operands: Operands,
    state: RowState,
    scratch: Scratch,
) -> None:
    """Algorithm 1, lines 5 to 13: one block of rows over all keys that it sees.

    The output is normalised after the last tile: one division, and one log-sum-exp in place of
    maximum and sum.
    """
    for tile in blocks.of_queries(queries):
        scores = transposed_product(operands.keys[:, :, tile.keys], scaled_q, scratch, "scores")
        operands.change(scores, tile)
        rescale = online_softmax(scores, state)
        operands.drop(scores, tile)
        if not tile.first:
            state.out *= rescale[..., None]
        values = operands.values[:, :, tile.keys]
        accumulate(state.out, scores.swapaxes(-1, -2), values, scratch, tile.first)
    state.out /= state.row_sum[..., None]


def _small_block(
    blocks: Blocks,
    queries: slice,
    scaled_q: Array,
    operands: Operands,
    state: RowState,
    scratch: Scratch,
) -> None:
    """Compute a block of scores so small that exp needs no maximum: the maximum stays 0."""
    state.row_max[...] = 0
    for tile in blocks.of_queries(queries):
        scores = transposed_product(operands.keys[:, :, tile.keys], scaled_q, scratch, "scores")
        operands.change(scores, tile)
        np.exp(scores, out=scores)
        state.row_sum += sum_over_keys(scores)
        operands.drop(scores, tile)
        values = operands.values[:, :, tile.keys]
        accumulate(state.out, scores.swapaxes(-1, -2), values, scratch, tile.first)
    state.out /= state.row_sum[..., None]


def backward(gradients: Gradients, rows: GradientRows) -> None:
    """Algorithm 2: delta is computed before the loops (line 4)."""
    delta = rows.delta(slice(None))
    gradients.column_blocks(rows, lambda part: delta[:, :, part])

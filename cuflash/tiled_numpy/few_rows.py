"""The forward pass of a few queries over many keys, as in decoding.

Tiles are [row, key] here. Lines of a few rows would be short, and NumPy needs as long for a short
line as for a long one.
"""

from __future__ import annotations

import numpy as np

from .blocks import Array, Blocks, Scratch
from .operands import Operands
from .steps import RowState

__all__ = ["few_rows_block"]


def few_rows_block(
    blocks: Blocks,
    queries: slice,
    scaled_q: Array,
    operands: Operands,
    state: RowState,
    scratch: Scratch,
) -> None:
    """FlashAttention-2, Algorithm 1, lines 5 to 13, for one block of rows."""
    for tile in blocks.of_queries(queries):
        keys, values = operands.keys[:, :, tile.keys], operands.values[:, :, tile.keys]
        scores = scratch.array("scores", (*scaled_q.shape[:3], keys.shape[2]))
        np.matmul(scaled_q, keys.swapaxes(-1, -2), out=scores)
        operands.change(scores.swapaxes(-1, -2), tile)
        new_max = np.maximum(scores.max(axis=-1), state.row_max)
        shift = np.where(new_max == -np.inf, 0, new_max)
        scores -= shift[..., None]
        np.exp(scores, out=scores)
        rescale = np.exp(state.row_max - shift)
        state.row_sum *= rescale
        state.row_sum += scores.sum(axis=-1)
        state.row_max[...] = new_max
        operands.drop(scores.swapaxes(-1, -2), tile)
        state.out *= rescale[..., None]
        state.out += np.matmul(scores, values)
    state.out /= state.row_sum[..., None]

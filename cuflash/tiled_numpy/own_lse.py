"""The log-sum-exp of the scores as the backward pass itself computes them."""

from __future__ import annotations

from .blocks import Array, Blocks, Scratch
from .operands import Operands
from .steps import RowState, finish, online_softmax, transposed_product

__all__ = ["own_lse"]


def own_lse(blocks: Blocks, operands: Operands, scaled_q: Array, scratch: Scratch) -> Array:
    """The log-sum-exp (batch, head, row) of ``operands.keys``, minus infinity for dead rows.

    These keys lack the part that all of them have in common, see :mod:`.common_part`.
    """
    state = RowState.start((*scaled_q.shape[:3], 0), blocks.compute)
    for queries in blocks.queries:
        rows = blocks.rows(queries)
        for tile in blocks.of_queries(queries):
            scores = transposed_product(
                operands.keys[:, :, tile.keys], scaled_q[:, :, rows], scratch, "weights"
            )
            operands.change(scores, tile)
            online_softmax(scores, state.part(rows))
    return finish(state, None)

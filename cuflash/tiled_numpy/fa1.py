"""FlashAttention-1 in NumPy (Dao et al. 2022)."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from ..planning.plan import Plan
from .blocks import Array, Blocks, Scratch
from .common_part import row_shift
from .gradients import GradientRows, Gradients
from .heads import Heads
from .operands import Operands
from .steps import RowState, finish, online_softmax, transposed_product
from .threads import Task

__all__ = ["backward", "forward"]


def forward(
    plan: Plan, q: Array, k: Array, v: Array, out: Array, lse: Array | None
) -> Iterator[Task]:
    """Algorithms 1 and 2: blocks of keys outside, blocks of queries inside.

    O, l and m of all rows are kept between a row's tiles, and O is normalised
    after every one. Arguments are those of :func:`cuflash.tiled_numpy.forward`.
    """
    blocks = Blocks(plan)
    q = blocks.live(q)
    for heads in Heads.of(blocks):
        operands = Operands(blocks, heads, q, k, v)
        for part in blocks.parts():
            yield functools.partial(_forward, part, heads.part(part), operands, q, out, lse)


def _forward(
    blocks: Blocks, heads: Heads, operands: Operands, q: Array, out: Array, lse: Array | None
) -> None:
    made, scratch = operands.make(), blocks.scratch
    scaled_q = heads.rows(q)
    scaled_q *= blocks.problem.scale
    state = RowState.start((*scaled_q.shape[:3], made.values.shape[-1]), blocks.compute)
    for block in blocks.keys:
        for tile in blocks.of_keys(block):
            scores = transposed_product(
                made.keys[:, :, tile.keys], scaled_q[:, :, tile.rows], scratch, "scores"
            )
            blocks.hide(scores, tile)
            _join(scores, made.values[:, :, tile.keys], state.part(tile.rows), scratch)
    shift = None if made.common is None else row_shift(scaled_q, made.common)
    all_lse = finish(state, shift)
    heads.set_rows(out, state.out)
    if lse is not None:
        heads.set_statistics(lse, all_lse)


def _join(scores: Array, v: Array, state: RowState, scratch: Scratch) -> None:
    """Algorithm 1, lines 10 to 13: O = (l_old e^(m_old - m) O + P V) / l.

    Weights are taken relative to the new maximum at once, which saves line
    12's second factor.
    """
    share = state.row_sum.copy()
    share *= online_softmax(scores, state)
    divisor = np.where(state.row_sum == 0, 1, state.row_sum)  # rows dead so far stay 0
    share /= divisor
    product = scratch.array("product", state.out.shape)
    np.matmul(scores.swapaxes(-1, -2), v, out=product)
    product /= divisor[..., None]
    state.out *= share[..., None]
    state.out += product


def backward(gradients: Gradients, rows: GradientRows) -> None:
    """Algorithm 4: delta is computed anew in every tile (line 19), from O and dO.

    P comes from lse = m + log l, the one statistic that a call hands on.
    """
    gradients.column_blocks(rows, rows.delta)

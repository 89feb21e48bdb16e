"""FlashAttention-1 in NumPy (Dao et al. 2022)."""

from __future__ import annotations

import numpy as np

from ..planning.plan import Plan
from .blocks import Array, Blocks, Scratch
from .gradients import GradientRows, column_blocks
from .heads import Heads
from .steps import RowState, finish, online_softmax, transposed_product

__all__ = ["backward", "forward"]


def forward(plan: Plan, q: Array, k: Array, v: Array, out: Array, lse: Array | None) -> None:
    """Algorithms 1 and 2: blocks of keys outside, blocks of queries inside.

    O, l and m of all rows are kept between a row's tiles, and O is normalised
    after every one. Arguments are those of :func:`cuflash.tiled_numpy.forward`.
    """
    blocks = Blocks(plan)
    scratch = Scratch(blocks.compute)
    for heads in Heads.of(blocks):
        scaled_q = heads.rows(q)
        scaled_q *= plan.problem.scale
        keys, values = heads.keys(k), heads.keys(v)
        state = RowState.start((*scaled_q.shape[:3], values.shape[-1]), blocks.compute)
        for block in blocks.keys:
            for tile in blocks.of_keys(block):
                scores = transposed_product(
                    keys[:, :, tile.keys], scaled_q[:, :, tile.rows], scratch, "scores"
                )
                blocks.hide(scores, tile)
                _join(scores, values[:, :, tile.keys], state.part(tile.rows), scratch)
        all_lse = finish(state)
        for queries in blocks.queries:
            rows = blocks.rows(queries)
            heads.set_rows(out, queries, state.out[:, :, rows])
            if lse is not None:
                heads.set_statistics(lse, queries, all_lse[:, :, rows])


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


def backward(
    plan: Plan,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    dq: Array,
    dk: Array,
    dv: Array,
) -> None:
    """Algorithm 4: delta is computed anew in every tile (line 19), from O and dO.

    P comes from lse = m + log l, the one statistic that a call hands on.
    Arguments are those of :func:`cuflash.tiled_numpy.backward`.
    """
    blocks = Blocks(plan)
    scratch = Scratch(blocks.compute)
    for heads in Heads.of(blocks):
        rows = GradientRows.load(blocks, heads, dout, q, out, lse, dlse)
        column_blocks(blocks, heads, rows, rows.delta, k, v, dk, dv, scratch)
        rows.store(blocks, heads, dq)

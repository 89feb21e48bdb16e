"""FlashAttention-2 in NumPy (Dao 2023)."""

from __future__ import annotations

from ..planning.plan import Plan
from .blocks import Array, Blocks, Scratch
from .gradients import GradientRows, column_blocks
from .heads import Heads
from .steps import RowState, accumulate, finish, online_softmax, transposed_product

__all__ = ["backward", "forward"]


def forward(plan: Plan, q: Array, k: Array, v: Array, out: Array, lse: Array | None) -> None:
    """Algorithm 1: blocks of queries outside, blocks of keys inside.

    Arguments are those of :func:`cuflash.tiled_numpy.forward`.
    """
    blocks = Blocks(plan)
    scratch = Scratch(blocks.compute)
    for heads in Heads.of(blocks):
        scaled_q = heads.rows(q)
        scaled_q *= plan.problem.scale
        keys, values = heads.keys(k), heads.keys(v)
        for queries in blocks.queries:
            state, block_lse = _block(blocks, queries, scaled_q, keys, values, scratch)
            heads.set_rows(out, queries, state.out)
            if lse is not None:
                heads.set_statistics(lse, queries, block_lse)


def _block(
    blocks: Blocks, queries: slice, scaled_q: Array, k: Array, v: Array, scratch: Scratch
) -> tuple[RowState, Array]:
    """Algorithm 1, lines 5 to 13: one block of rows over all keys that it sees.

    The output stays un-normalised until the last tile: one division, and one
    log-sum-exp in place of maximum and sum.
    """
    block_q = scaled_q[:, :, blocks.rows(queries)]
    state = RowState.start((*block_q.shape[:3], v.shape[-1]), blocks.compute)
    for tile in blocks.of_queries(queries):
        scores = transposed_product(k[:, :, tile.keys], block_q, scratch, "scores")
        blocks.hide(scores, tile)
        rescale = online_softmax(scores, state)
        first = tile.keys.start == 0
        if not first:
            state.out *= rescale[..., None]
        accumulate(state.out, scores.swapaxes(-1, -2), v[:, :, tile.keys], scratch, first)
    state.out /= state.row_sum[..., None]
    return state, finish(state)


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
    """Algorithm 2: delta is computed before the loops (line 4).

    Arguments are those of :func:`cuflash.tiled_numpy.backward`.
    """
    blocks = Blocks(plan)
    scratch = Scratch(blocks.compute)
    for heads in Heads.of(blocks):
        rows = GradientRows.load(blocks, heads, dout, q, out, lse, dlse)
        delta = rows.delta(slice(None))

        def delta_of(part: slice, delta: Array = delta) -> Array:
            return delta[:, :, part]

        column_blocks(blocks, heads, rows, delta_of, k, v, dk, dv, scratch)
        rows.store(blocks, heads, dq)

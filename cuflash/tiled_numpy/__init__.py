"""FlashAttention without a GPU: the papers' tiled algorithms on NumPy's matrix products."""

from __future__ import annotations

import itertools
import math

import numpy as np

from ..planning.plan import Plan
from . import fa1, fa2, gradients, outputs
from .bias_gradient import BiasGradient
from .blocks import Array, tile_of
from .by_entry import parts_of
from .threads import run_tasks

__all__ = ["backward", "forward"]

_ALGORITHMS = {"fa1": fa1, "fa2": fa2}


def forward(
    plan: Plan,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array | None = None,
    sinks: Array | None = None,
    **more: Array,
) -> None:
    """Write ``softmax(scale * q k^T) v`` and its log-sum-exp to their destinations.

    FlashAttention-1, Algorithms 1 and 2 (Dao et al. 2022), or FlashAttention-2, Algorithm 1 (Dao
    2023), as the plan says. Beside the arrays it needs O(seqlen * (block + head_dim)) memory.

    Parameters
    ----------
    plan
        A plan of the numpy backend for this problem; nothing is checked against it.
    q
        (batch, seqlen_q, heads_q, head_dim). Like every array here, of any strides and of float16,
        bfloat16, float32 or float64.
    k, v
        (batch, seqlen_kv, heads_kv, head_dim) and the same with head_dim_v.
    out
        Destination, (batch, seqlen_q, heads_q, head_dim_v).
    lse
        Destination, (batch, heads_q, seqlen_q) of the statistics dtype, or None: the natural
        logarithm of the sum of exp of a row's scores.
    sinks
        (heads_q,): one more score of every row, whose value is zero. Minus infinity means no sink;
        plus infinity and NaN make their head NaN. A row that sees no key has the output 0 and the
        log-sum-exp of its sink.
    **more
        Operands of the plan's other features, by name.
    """
    inner = _ALGORITHMS[plan.algorithm].forward
    parts = parts_of(plan, outputs.GivenForward(q, k, v, out, lse, sinks, more))
    tasks = (outputs.tasks(part.plan, inner, part.given) for part in parts)
    run_tasks(itertools.chain.from_iterable(tasks), tile_of(plan).threads)


def backward(
    plan: Plan,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dlse: Array | None = None,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    sinks: Array | None = None,
    dsinks: Array | None = None,
    **more: Array,
) -> None:
    """Write the gradients of :func:`forward` to their destinations.

    FlashAttention-1, Algorithm 4 (Dao et al. 2022), or FlashAttention-2,
    Algorithm 2 (Dao 2023), as the plan says: P = exp(S - lse),
    delta = rowsum(dO * O) - dlse, dS = P * (dP - delta).

    Parameters
    ----------
    plan
        A plan of the numpy backend for this problem; nothing is checked against it.
    dout
        Gradient of ``out``, with the same shape.
    q, k, v, out, lse, sinks
        The inputs and outputs of :func:`forward`.
    dlse
        Gradient of ``lse``, with the same shape; None means zeros.
    dq, dk, dv
        Destinations, like ``q``, ``k`` and ``v``; None for an unwanted gradient. Heads of a group
        are summed in the compute dtype and rounded once.
    dsinks
        Destination, like ``sinks``, or None: the sum of P (dlse - rowsum(dO * O)) over all rows of
        a head, with P the weight of the sink. The order of the sum does not depend on the threads.
    **more
        The same as for :func:`forward`, and destinations of their gradients.
    """
    inner, problem = _ALGORITHMS[plan.algorithm].backward, plan.problem
    summed = [(use.pair_sums, more.get(f"d{use.pair_sums}")) for use in problem.uses]
    dpairs = next((array for name, array in summed if name is not None), None)
    given = gradients.Given(dout, q, k, v, out, lse, dlse, dq, dk, dv, sinks, more)
    parts = parts_of(plan, given)
    shape = (problem.batch, problem.heads_q, problem.seqlen_q)
    by_row = gradients.ByRow(
        *(None if to is None else np.zeros(shape, problem.compute) for to in (dsinks, dpairs))
    )
    threads = tile_of(plan).threads
    tasks = (gradients.tasks(p.plan, inner, p.given, p.statistics(by_row)) for p in parts)
    run_tasks(itertools.chain.from_iterable(tasks), threads)
    if "dbias" in more:
        of_bias = BiasGradient(plan, parts, more["dbias"])
        run_tasks(of_bias.tasks(), threads)
        of_bias.finish()
    for to, rows in ((dsinks, by_row.sinks), (dpairs, by_row.pairs)):
        if to is not None and rows is not None:
            _sum_rows(to, rows)


def _sum_rows(to: Array, rows: Array) -> None:
    """Sum rows (batch, heads_q, seqlen_q) over all axes that the result lacks."""
    by_head = rows.swapaxes(0, 1) if to.ndim == 1 else rows
    with np.errstate(invalid="ignore"):
        to[...] = by_head.reshape(*to.shape, math.prod(rows.shape) // max(1, to.size)).sum(axis=-1)

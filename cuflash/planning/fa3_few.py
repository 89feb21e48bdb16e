"""The plan of FlashAttention-3's backward pass for few queries."""

from __future__ import annotations

from dataclasses import replace

from ..errors import UnsupportedError
from .decision import Algorithm, Plan
from .device import DeviceLimits
from .hopper import for_hopper
from .kernel import KernelLaunch, kernel_config, lay_out
from .overlapping import overlapping
from .problem import AttentionProblem
from .row_steps import RowSteps, launchable
from .tiles import fa3
from .tiles.common import ceil_div
from .tiles.fa3_few import Fa3FewTile, why_not_few

__all__ = ["few_plan", "kv_splits_of"]

#: Steps, each a kv tile, that a block takes to begin and to end.
_STEPS_OF_BLOCK = 2


def few_plan(
    problem: AttentionProblem,
    limits: DeviceLimits,
    tile: Fa3FewTile,
    reason: str,
    rejected: tuple[tuple[Algorithm, str], ...],
) -> Plan:
    """A block for each head, or for each of the splits of its kv tiles.

    dQ of a block is added to sums, as in the other backward pass: ``statistics``
    clears them all, and ``convert_dq`` rounds them.

    Raises
    ------
    UnsupportedError
        If the tile does not take the problem.
    """
    against = why_not_few(problem)
    if against is not None:
        raise UnsupportedError(f"fa3's tile for few queries {against}")
    splits = kv_splits_of(problem, limits, tile)
    rows = RowSteps(problem, limits, "fa3", fa3.ARITHMETIC, tile.head_dim)
    config = kernel_config(
        problem, limits, ("fa3", "backward_few"), fa3.ARITHMETIC, tile.constants(), tile.footprint
    )
    config = replace(config, head_dim=tile.head_dim, head_dim_v=tile.head_dim_v)
    boxes = (("q", tile.block_q), ("k", tile.block_kv), ("v", tile.block_kv))
    grid = launchable(problem.batch * problem.heads_q * splits, "fa3")
    arguments = (("kv_splits", splits), rows.rows)
    main = KernelLaunch(config, grid, arguments, (*boxes, ("dout", tile.block_q)))
    workspace = tuple(lay_out(rows.sizes))
    if splits > 1:
        reason += f"; {splits} blocks share the kv tiles of a head, as heads are few"
    launches = tuple(map(for_hopper, overlapping(rows.around(main))))
    return Plan(problem, "cuda", "fa3", tile, reason, rejected, launches, workspace)


def kv_splits_of(problem: AttentionProblem, limits: DeviceLimits, tile: Fa3FewTile) -> int:
    """Blocks that share the kv tiles of a head.

    The number whose blocks, which come in rounds of one for every
    multiprocessor, take the fewest steps one after the other. In an order that
    is the same from run to run one block adds up all of dQ.
    """
    tiles = problem.tiles(problem.seqlen_kv, tile.block_kv)
    heads = problem.batch * problem.heads_q
    if problem.deterministic or heads >= 4 * limits.num_sms:
        return 1

    def steps(splits: int) -> int:
        """Of all rounds."""
        rounds = ceil_div(heads * splits, limits.num_sms)
        return rounds * (ceil_div(tiles, splits) + _STEPS_OF_BLOCK)

    return min(range(1, min(tiles, limits.num_sms) + 1), key=steps)

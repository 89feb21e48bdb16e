"""The plan of FlashAttention-3's backward pass for short heads."""

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
from .tiles.fa3_short import Fa3ShortTile, why_not_short

__all__ = ["short_plan"]


def short_plan(
    problem: AttentionProblem,
    limits: DeviceLimits,
    tile: Fa3ShortTile,
    reason: str,
    rejected: tuple[tuple[Algorithm, str], ...],
) -> Plan:
    """A block for each multiprocessor, which takes one head after the other.

    It stores dq itself, so there are two kernels.

    Raises
    ------
    UnsupportedError
        If the tile does not take the problem.
    """
    against = why_not_short(problem)
    if against is not None:
        raise UnsupportedError(f"fa3's tile for short heads {against}")
    rows = RowSteps(problem, limits, "fa3", fa3.ARITHMETIC, tile.head_dim, sums_dq=False)
    config = kernel_config(
        problem, limits, ("fa3", "backward_short"), fa3.ARITHMETIC, tile.constants(), tile.footprint
    )
    config = replace(config, head_dim=tile.head_dim, head_dim_v=tile.head_dim_v)
    of_q = tile.block_q // tile.q_tiles
    boxes = (("q", of_q), ("k", tile.block_kv), ("v", tile.block_kv), ("dout", of_q))
    grid = min(launchable(problem.batch * problem.heads_q, "fa3"), limits.num_sms)
    main = KernelLaunch(config, grid, (rows.rows,), boxes)
    launches = tuple(map(for_hopper, overlapping(rows.around(main))))
    return Plan(
        problem, "cuda", "fa3", tile, reason, rejected, launches, tuple(lay_out(rows.sizes))
    )

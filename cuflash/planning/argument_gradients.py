"""The kernels that compute gradients of the arguments of features."""

from __future__ import annotations

from dataclasses import replace

from .device import DeviceLimits
from .kernel import KernelLaunch, kernel_config
from .problem import DTYPES, AttentionProblem
from .tiles import steps
from .tiles.common import Arithmetic

__all__ = ["argument_gradients"]


def argument_gradients(
    problem: AttentionProblem, limits: DeviceLimits, arithmetic: Arithmetic, padded_rows: int
) -> tuple[KernelLaunch, ...]:
    """Launches after a backward pass, for what ``wrt`` names beside q, k and v.

    Parameters
    ----------
    problem, limits, arithmetic
        Those of the pass.
    padded_rows
        Rows of a head in the workspace's ``delta``.
    """
    if "sinks" not in problem.wrt:
        return ()
    storage = DTYPES[problem.operands["sinks"].dtype].name
    tile = steps.SinkTile()
    kernel = ("steps", "sink_gradient")
    config = kernel_config(problem, limits, kernel, arithmetic, tile.constants(), tile.footprint)
    # Nothing else changes its code.
    config = replace(config, storage=storage, output=storage, head_dim=0, head_dim_v=0)
    config = replace(config, copies="element", products="scalar", mma_depth=0)
    return (KernelLaunch(config, problem.heads_q, (("padded_rows", padded_rows),)),)

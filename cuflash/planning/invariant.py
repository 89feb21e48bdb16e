"""Plans whose rows have the same bits in a batch of any size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from .decision import Algorithm, Plan
from .device import DeviceLimits, HostLimits
from .fa2 import fa2_plan
from .fa3 import fa3_plan
from .key_chunks import chunk_of
from .plan import plan
from .problem import AttentionProblem

__all__ = ["batch_invariant_plan"]

#: Entries of the batch that tile and chunk are chosen for. On an H200 what suits it is at most a
#: tenth slower from 1 to 64: bench/NOTES.md.
_USUAL_BATCH = 8


def batch_invariant_plan(
    problem: AttentionProblem,
    limits: DeviceLimits | HostLimits,
    *,
    algorithm: Algorithm | Literal["auto"] = "auto",
    blocks: tuple[int, int] | None = None,
    kv_chunk: int | None = None,
) -> Plan:
    """The plan of a forward pass in the tile and chunk of a usual batch.

    As :func:`~cuflash.planning.plan.plan`: pure, with its errors. What a row is
    computed from, in which order, depends on the tile and the chunk alone.
    """
    if isinstance(limits, HostLimits):  # whose rows are walked one like the other
        return plan(problem, limits, algorithm=algorithm, blocks=blocks, kv_chunk=kv_chunk)
    usual = replace(problem, batch=_USUAL_BATCH)
    first = plan(usual, limits, algorithm=algorithm, blocks=blocks, kv_chunk=kv_chunk)
    chunk = chunk_of(first.problem)
    if first.algorithm == "fa1":
        tile = first.tile.block_q, first.tile.block_kv
        same = plan(problem, limits, algorithm="fa1", blocks=tile)
    else:
        of_tile = _OF_TILE[first.algorithm]
        same = of_tile(problem, limits, None, (), tile=first.tile, kv_chunk=chunk)
    return replace(same, reason=first.reason, rejected=first.rejected)


_OF_TILE: dict[str, Callable[..., Plan]] = {"fa2": fa2_plan, "fa3": fa3_plan}

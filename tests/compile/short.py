"""Backward passes of short heads with the tile whose blocks keep all queries of a head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from cuflash.planning.device import DeviceLimits
from cuflash.planning.fa3 import fa3_plan
from cuflash.planning.plan import Plan
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles.fa3_short import short_tiles
from cuflash.planning.tiles.fa3_tables import BACKWARD_OF_SHORT

from .split import SplitCall

__all__ = ["short_calls"]


@dataclass(frozen=True)
class _ShortCall(SplitCall):
    """A problem whose plan has the tile for short heads, whatever else there is."""

    def plan(self, limits: DeviceLimits) -> Plan:
        return fa3_plan(self.problem, limits, None, (), tile=next(short_tiles(self.problem)))


def short_calls(plain: AttentionProblem) -> Iterator[SplitCall]:
    """Calls of FlashAttention-3; ``plain`` is the rest of their problem."""
    of_heads = replace(plain, operation="backward", heads_kv=plain.heads_q, seqlen_q=197)
    for row, mask, dtype in product(BACKWARD_OF_SHORT, ("full", "causal"), ("float16", "bfloat16")):
        of = replace(of_heads, head_dim=row.widest, head_dim_v=row.widest_v, mask=mask)
        yield _ShortCall(replace(of, storage=dtype, output=dtype), "fa3")

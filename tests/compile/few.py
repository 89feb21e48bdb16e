"""Backward passes of few queries with the tile whose blocks keep all queries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from cuflash.planning.device import DeviceLimits
from cuflash.planning.fa3 import fa3_plan
from cuflash.planning.plan import Plan
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles.fa3_few import few_tiles
from cuflash.planning.tiles.fa3_tables import BACKWARD_OF_FEW

from .split import SplitCall

__all__ = ["few_calls"]


@dataclass(frozen=True)
class _FewCall(SplitCall):
    """A problem whose plan has the tile for few queries, even where another is faster."""

    def plan(self, limits: DeviceLimits) -> Plan:
        return fa3_plan(self.problem, limits, None, (), tile=next(few_tiles(self.problem)))


def few_calls(plain: AttentionProblem) -> Iterator[SplitCall]:
    """Calls of FlashAttention-3; ``plain`` gives the other fields of their problems."""
    of_heads = replace(plain, operation="backward", heads_kv=plain.heads_q, seqlen_q=77)
    for row, mask, dtype in product(BACKWARD_OF_FEW, ("full", "causal"), ("float16", "bfloat16")):
        of = replace(of_heads, head_dim=row.widest, head_dim_v=row.widest_v, mask=mask)
        yield _FewCall(replace(of, storage=dtype, output=dtype), "fa3")

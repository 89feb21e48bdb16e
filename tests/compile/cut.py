"""Backward passes where several blocks cut the steps of a kv tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from cuflash.planning.device import DeviceLimits
from cuflash.planning.fa3 import fa3_plan
from cuflash.planning.key_parts import Parts
from cuflash.planning.plan import Plan
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles.fa3_tables import BACKWARD

from .split import SplitCall

__all__ = ["cut_calls"]

#: Queries and keys, so many that no tile for few queries is taken.
_LENGTH = 4096


@dataclass(frozen=True)
class _CutCall(SplitCall):
    """A problem whose kv tiles are cut in two, whatever its size is."""

    def plan(self, limits: DeviceLimits) -> Plan:
        return fa3_plan(self.problem, limits, None, (), parts=Parts(2, cut=True))


def cut_calls(plain: AttentionProblem) -> Iterator[SplitCall]:
    """Calls of FlashAttention-3; ``plain`` is the rest of their problem."""
    of_heads = replace(plain, operation="backward", seqlen_q=_LENGTH, seqlen_kv=_LENGTH)
    widths = dict.fromkeys((row.widest, row.widest_v) for row in BACKWARD)
    for (d, dv), mask, dtype in product(widths, ("full", "causal"), ("float16", "bfloat16")):
        of = replace(of_heads, head_dim=d, head_dim_v=dv, mask=mask)
        yield _CutCall(replace(of, storage=dtype, output=dtype), "fa3")

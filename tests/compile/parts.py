"""Backward passes where several blocks share a kv tile."""

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

__all__ = ["part_calls"]

#: Queries and keys, so many that no tile for few queries is taken; some rows end at 4096.
_LENGTHS = (4096, 8192)


@dataclass(frozen=True)
class _PartCall(SplitCall):
    """A problem whose kv tiles have two parts, whatever its size is."""

    cut: bool = False

    def plan(self, limits: DeviceLimits) -> Plan:
        return fa3_plan(self.problem, limits, None, (), parts=Parts(2, self.cut))


def part_calls(plain: AttentionProblem) -> Iterator[SplitCall]:
    """Calls of FlashAttention-3; ``plain`` is the rest of their problem."""
    of_heads = replace(plain, operation="backward", heads_q=2, heads_kv=1)
    widths = dict.fromkeys((row.widest, row.widest_v) for row in BACKWARD)
    kinds = product(widths, ("full", "causal"), ("float16", "bfloat16"), (False, True))
    for ((d, dv), mask, dtype, cut), length in product(kinds, _LENGTHS):
        of = replace(of_heads, head_dim=d, head_dim_v=dv, mask=mask)
        of = replace(of, seqlen_q=length, seqlen_kv=length)
        yield _PartCall(replace(of, storage=dtype, output=dtype), "fa3", cut=cut)

"""Backward passes where several blocks share a kv tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from cuflash.planning.device import DeviceLimits
from cuflash.planning.fa3 import fa3_plan
from cuflash.planning.key_parts import ONE_PART, Parts
from cuflash.planning.plan import Plan
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles.fa3_tables import BACKWARD

from ..kit.backward_rows import widths_of
from .split import SplitCall

__all__ = ["part_calls"]

#: Queries and keys, so many that no tile for few queries is taken; some rows end at 4096.
_LENGTHS = (4096, 8192)
#: A kernel for each.
_PARTS = (Parts(2), Parts(2, cut=True), Parts(2, cut=True, last=1))


@dataclass(frozen=True)
class _PartCall(SplitCall):
    """A problem whose kv tiles, or the last ones, have two parts, whatever its size is."""

    parts: Parts = ONE_PART

    def plan(self, limits: DeviceLimits) -> Plan:
        return fa3_plan(self.problem, limits, None, (), parts=self.parts)


def part_calls(plain: AttentionProblem) -> Iterator[SplitCall]:
    """Calls of FlashAttention-3; ``plain`` is the rest of their problem."""
    of_heads = replace(plain, operation="backward", heads_q=2, heads_kv=1)
    widths = dict.fromkeys(widths_of(row) for row in BACKWARD)
    kinds = product(widths, ("full", "causal"), ("float16", "bfloat16"), _PARTS)
    for ((d, dv), mask, dtype, parts), length in product(kinds, _LENGTHS):
        if parts.last and mask != "full":
            continue  # tiles of unequal work are not cut in this way
        of = replace(of_heads, head_dim=d, head_dim_v=dv, mask=mask)
        of = replace(of, seqlen_q=length, seqlen_kv=length)
        yield _PartCall(replace(of, storage=dtype, output=dtype), "fa3", parts=parts)

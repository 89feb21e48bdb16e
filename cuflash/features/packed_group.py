"""Packed groups, which a plan adds to a problem with one query.

The query heads that share a kv head become rows of one tile, so that their keys
are read once. It is no argument of a call.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..planning.problem import AttentionProblem
from .device import DevicePart
from .kv_chunks import MERGE
from .use import Use

__all__ = ["with_packed_group"]

#: Features that are the same for all heads and do not use the number of a row.
_SHARED = frozenset(("window", "used_lengths", "softcap", "cached_keys", "float8"))

_DEVICE = DevicePart(
    kernels=frozenset((("fa2", "forward"), ("fa3", "forward"), MERGE)),
    struct="PackedGroupParams",
    block=np.dtype([("group", np.int64)], align=True),
    seams=(("Lengths", "OnePosition<{before}>"),),
    header="features/packed_group.cuh",
)


def with_packed_group(problem: AttentionProblem) -> AttentionProblem:
    """Return the problem with its groups as rows, or unchanged if they cannot be rows."""
    group = problem.group
    alone = problem.seqlen_q == 1 and problem.operation == "forward" and not problem.sequences
    if not alone or group == 1 or problem.group_rows > 1:
        return problem
    if not _SHARED.issuperset(problem.features) or "seqused_q" in problem.operands:
        return problem
    use = Use("packed_group", _DEVICE, numbers=(("group", group),), shown=f"groups of {group}")
    return replace(
        problem,
        heads_q=problem.heads_kv,
        seqlen_q=group,
        group_rows=group,
        uses=(*problem.uses, use),
    )

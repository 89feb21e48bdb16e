"""Packed queries of attention over caches: every entry has its own number of queries.

Rows ``offsets[b]`` to ``offsets[b + 1]`` of q are the queries of entry b, whose keys
are those of its cache. Rows after the last offset belong to no entry. The last query
of an entry is at its last key. The function ``attention`` does not have this argument.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..planning.problem import MAX_SEQLEN
from .device import DevicePart
from .feature import ArrayRule, Feature, Request
from .kv_chunks import MERGE
from .use import Operand, Use

__all__ = ["NAME", "PACKED_QUERIES", "packed_tokens"]

#: The array of offsets, which callers know as ``cu_seqlens_q``.
NAME = "query_offsets"

_DEVICE = DevicePart(
    kernels=frozenset((("fa2", "forward"), ("fa3", "forward"), MERGE)),
    struct="PackedQueriesParams",
    block=np.dtype(
        [*((name, np.uint64) for name in ("q_begins", "q_items")), ("entries", np.int64)],
        align=True,
    ),
    seams=(("Lengths", "PackedQueries<{before}>"),),
    header="features/packed_queries.cuh",
)


#: For the kernel that appends, where the array has the name that callers use.
_TOKENS = DevicePart(
    kernels=frozenset((("steps", "append_kv"),)),
    struct="PackedTokensParams",
    block=np.dtype([("cu_seqlens_q", np.uint64)], align=True),
    seams=(),
    header="features/packed_tokens.cuh",
)


def packed_tokens(offsets: Operand) -> Use:
    """Return what packed tokens and queries add to the kernel that appends."""
    return Use("packed_tokens", _TOKENS, operands=(offsets,))


def _use(request: Request) -> Use | None:
    if NAME not in request.operands:
        return None
    problem = request.problem
    return Use(
        *("packed_queries", _DEVICE),
        numbers=(("entries", problem.num_entries),),
        operands=(request.operands[NAME],),
        shown=f"packed queries of {problem.num_entries} entries, up to {problem.most_queries}",
    )


def _number(_: str, value: Any) -> int:
    return min(int(value), MAX_SEQLEN)


PACKED_QUERIES = Feature(
    "packed_queries",
    _use,
    _DEVICE,
    keywords={"most_queries": _number},
    arrays={NAME: ArrayRule((), ("int32",), most_axes=1)},
)

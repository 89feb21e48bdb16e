"""Attention of packed queries over caches in host memory: one entry after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentValueError
from .given import CacheCall
from .lengths import Lengths
from .packed import ARGUMENT, rows_of_entries

__all__ = ["check_queries", "forward_packed", "positions_of_rows", "rows_of"]

_Array = NDArray[Any]
_Arrays = dict[str, Any]
#: Arrays that always have an axis of entries. Slopes have one unless all entries share them.
_OF_ENTRIES = ("k", "v", "seqused_kv")


def check_queries(call: CacheCall) -> None:
    """Check that no entry has more queries than ``max_seqlen_q``, if it is given.

    Raises
    ------
    ArgumentValueError
        If an entry has more queries.
    """
    longest = max(rows.stop - rows.start for rows in _rows(call)[:-1])
    if longest > call.sizes.most_queries:
        expected = f"{longest} or more, the most queries of an entry"
        raise ArgumentValueError("max_seqlen_q", str(call.sizes.most_queries), expected)


def forward_packed(
    call: CacheCall,
    forward: Callable[[Mapping[str, Any], Mapping[str, Any]], _Arrays],
    natives: Mapping[str, Any],
    keywords: Mapping[str, Any],
) -> _Arrays:
    """Return out and lse of all entries; rows of no entry are 0 and minus infinity.

    Parameters
    ----------
    call
        The checked call.
    forward
        Attention of a batch.
    natives
        The arrays of attention; the used keys of an entry are its first rows.
    keywords
        The keywords of attention.
    """
    *rows, behind = _rows(call)
    q = natives["q"]
    compute = "float64" if call.spec("q").dtype == "float64" else "float32"
    out, lse = natives.get("out"), natives.get("lse_out")
    if out is None:
        out = np.empty((*q.shape[:2], natives["v"].shape[3]), q.dtype)
    if lse is None:
        lse = np.empty((q.shape[1], len(q)), compute)
    for b, own in enumerate(rows):
        if own.start < own.stop:
            targets = {"out": out[None, own], "lse_out": lse[None, :, own]}
            forward({"q": q[None, own], **_of_entry(natives, b), **targets}, keywords)
    out[behind], lse[:, behind] = 0, -np.inf
    return {"out": out, "lse": lse}


def rows_of(call: CacheCall, entry: _Array, token: _Array) -> Any:
    """Return the index of new tokens in their array."""
    if not call.sizes.most_queries:
        return entry, token
    begins = np.array([own.start for own in _rows(call)], np.int64)
    return begins[entry] + token


def positions_of_rows(call: CacheCall, lengths: Lengths, advance: bool) -> _Array:
    """Return the position at which every query is rotated; 0 for rows of no entry."""
    positions = np.zeros(call.spec("q").shape[0], np.int64)
    for own, first in zip(_rows(call)[:-1], lengths.positions, strict=True):
        positions[own] = first + np.arange(own.stop - own.start) * advance
    return positions


def _rows(call: CacheCall) -> list[slice]:
    return rows_of_entries(call.native(ARGUMENT), call.spec("q").shape[0])


def _of_entry(natives: Mapping[str, Any], b: int) -> _Arrays:
    """Return the arrays of one entry, and the arrays that all entries share."""
    found = {name: natives[name][b : b + 1] for name in _OF_ENTRIES}
    slopes = natives.get("alibi_slopes")
    if slopes is not None:
        found["alibi_slopes"] = slopes[b : b + 1] if slopes.ndim == 2 else slopes
    return found | ({"sinks": natives["sinks"]} if "sinks" in natives else {})

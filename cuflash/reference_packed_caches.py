"""Packed queries and new tokens for :mod:`cuflash.reference`, one entry after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["counts", "packed_append", "queries"]

_Array = NDArray[Any]

#: Arrays with a number or a row for each entry.
_EACH = "cache_seqlens", "page_table", "cache_batch_idx", "rotary_seqlens"


def counts(offsets: _Array, total: int) -> list[int]:
    """The number of rows of each entry; an offset below the one before it counts as that one."""
    return [rows.stop - rows.start for rows in _slices(offsets, total)]


def queries(q: _Array, offsets: _Array | None) -> list[tuple[tuple[int, ...], int, int, int]]:
    """For every query its index in q, its entry, its number there, and the entry's queries."""
    if offsets is None:
        return [((b, i), b, i, q.shape[1]) for b, i in np.ndindex(*q.shape[:2])]
    return [
        ((row,), b, row - rows.start, rows.stop - rows.start)
        for b, rows in enumerate(_slices(offsets, len(q)))
        for row in range(rows.start, rows.stop)
    ]


def packed_append(append_kv: Callable[..., Any], offsets: _Array) -> Callable[..., Any]:
    """The append of packed tokens: the tokens of one entry after those of another."""

    def append(
        k: _Array, v: _Array, k_cache: _Array, v_cache: _Array, **given: Any
    ) -> tuple[_Array, _Array, _Array]:
        overflow = []
        for b, rows in enumerate(_slices(offsets, len(k))):
            own = {name: _of_entry(name, value, b) for name, value in given.items()}
            if own["page_table"] is None and own["cache_batch_idx"] is None:
                own["cache_batch_idx"] = np.array([b])
            tokens = k[None, rows], v[None, rows]
            k_cache, v_cache, missing = append_kv(*tokens, k_cache, v_cache, **own)
            overflow += missing.tolist()
        return k_cache, v_cache, np.array(overflow, np.int32)

    return append


def _of_entry(name: str, value: Any, b: int) -> Any:
    """One entry's part of an array that has one for each."""
    each = name in _EACH if name not in ("k_scale", "v_scale") else np.ndim(value) == 2
    return value[b : b + 1] if each and value is not None else value


def _slices(offsets: _Array, total: int) -> list[slice]:
    found, begin = [], 0
    for offset in offsets[1:]:
        end = max(begin, min(int(offset), total))
        found.append(slice(begin, end))
        begin = end
    return found

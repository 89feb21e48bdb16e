"""Lengths and tables in host memory, checked before anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentValueError
from .given import CacheCall
from .packed import ARGUMENT, rows_of_entries

__all__ = ["Lengths", "lengths_of", "queries_of"]

_Array = NDArray[Any]


@dataclass(frozen=True)
class Lengths:
    """Lengths of every entry of the batch, int64.

    Attributes
    ----------
    before, after
        Length before and after the append; it includes padding on the left.
    new
        Number of new tokens.
    positions
        Position of the first new token and of the first query, for their rotation.
    padding
        Number of unused slots at the beginning.
    """

    before: _Array
    after: _Array
    new: _Array
    positions: _Array
    padding: _Array

    @property
    def fitting(self) -> _Array:
        """Number of new tokens that have a slot; these are the first tokens."""
        return self.after - self.before


def lengths_of(call: CacheCall, queries: _Array | int = 0) -> Lengths:
    """Return the lengths of a call on the host.

    Parameters
    ----------
    call
        A call whose shapes are checked.
    queries
        Number of positions at which queries are rotated; the first is that of the first new token.

    Raises
    ------
    ArgumentValueError
        If a length, an entry of a table or a position is out of range, or a
        new token has no slot and ``overflow`` is not given.
    """
    sizes = call.sizes
    before = _numbers(call, "cache_seqlens", call.length or 0)
    padding = _numbers(call, "cache_leftpad", 0)
    positions = before.copy()
    if "rotary_seqlens" in call.arrays:
        positions = _numbers(call, "rotary_seqlens", 0)
    _check_range(call, before)
    if (padding < 0).any():
        raise ArgumentValueError("cache_leftpad", str(padding.min()), "0 or more")
    room = sizes.capacity - before
    if call.interleaved is not None:
        table = len(call.native("rotary_cos"))
        room = np.minimum(room, np.where(positions < 0, 0, table - positions))
    new = _new_tokens(call)
    fitting = np.clip(room, 0, new)
    if "overflow" not in call.arrays:
        _check_room(call, before, new, positions, np.maximum(new, queries))
    lengths = Lengths(before, before + fitting, new, positions, padding)
    _check_places(call, lengths)
    return lengths


def _numbers(call: CacheCall, name: str, default: int) -> _Array:
    given = call.native(name)
    if given is None:
        return np.full(call.sizes.batch, default, np.int64)
    numbers: _Array = given.astype(np.int64)
    return numbers


def _check_range(call: CacheCall, before: _Array) -> None:
    """Check that lengths are 0 to the capacity."""
    capacity = call.sizes.capacity
    wrong = (before < 0) | (before > capacity)
    if not wrong.any():
        return
    length, slots = int(before[wrong][0]), call.sizes.slots
    if "page_table" in call.arrays and length > 0:
        got = f"{capacity // slots if slots else 0} pages of {slots} for a length of {length}"
        raise ArgumentValueError("page_table", got, f"{-(-length // max(slots, 1))} or more")
    expected = f"0 to {capacity}, the slots of an entry"
    raise ArgumentValueError("cache_seqlens", f"a length of {length}", expected)


def queries_of(call: CacheCall) -> _Array:
    """Return the number of queries of every entry of a call whose queries are packed."""
    rows = rows_of_entries(call.native(ARGUMENT), call.spec("q").shape[0])
    return np.array([own.stop - own.start for own in rows[:-1]], np.int64)


def _new_tokens(call: CacheCall) -> _Array:
    if call.sizes.most_queries and "k" in call.arrays:
        return queries_of(call)
    return np.full(call.sizes.batch, call.sizes.new_tokens, np.int64)


def _check_room(
    call: CacheCall, before: _Array, new: _Array, positions: _Array, turned: _Array
) -> None:
    """Check that every token and query fits: without ``overflow`` none may be left out."""
    sizes = call.sizes
    for entry in np.flatnonzero(before + new > sizes.capacity)[:1]:
        got = f"{new[entry]} new tokens behind {before[entry]} in {sizes.capacity} slots"
        raise ArgumentValueError("k", got, "room for all of them, or overflow=")
    if call.interleaved is None:
        return
    table = len(call.native("rotary_cos"))
    if (positions < 0).any():
        raise ArgumentValueError("rotary_seqlens", str(positions.min()), "0 or more")
    last = int(np.where(turned > 0, positions + turned, 0).max(initial=0))
    if last > table:
        expected = f"{last} or more, for all new tokens and queries, or overflow="
        raise ArgumentValueError("rotary_cos", f"{table} positions", expected)


def _check_places(call: CacheCall, lengths: Lengths) -> None:
    """Check that the used entries of the cache, or pages, exist."""
    name = "page_table" if "page_table" in call.arrays else "cache_batch_idx"
    given = call.native(name)
    if given is None:
        return
    attends = "q" in call.arrays
    used = given[(lengths.after if attends else lengths.fitting) > 0]
    if name == "page_table":
        slots = max(call.sizes.slots, 1)
        begin = np.minimum(lengths.padding, lengths.before) if attends else lengths.before
        first, end = begin // slots, -(-lengths.after // slots)
        end = np.where(attends | (lengths.fitting > 0), end, 0)
        page = np.arange(given.shape[1])
        used = given[(page >= first[:, None]) & (page < end[:, None])]
    wrong = (used < 0) | (used >= call.sizes.entries)
    if wrong.any():
        kind = "a page" if name == "page_table" else "an entry"
        expected = f"0 to {call.sizes.entries - 1} where {kind} is used"
        raise ArgumentValueError(name, f"{kind.split()[1]} {used[wrong][0]}", expected)

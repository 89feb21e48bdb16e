"""Caches in host memory: appends tokens, and returns keys and values for attention."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .float8 import dequantised, of_each_head, quantised
from .given import CacheCall
from .host_packed import positions_of_rows, rows_of
from .lengths import Lengths
from .rotary import rotate

__all__ = ["append", "held", "numbers_of", "rotated_queries"]

_Array = NDArray[Any]


def append(call: CacheCall, lengths: Lengths) -> None:
    """Write the new tokens that fit into the caches, and count the others in ``overflow``.

    Parameters
    ----------
    call, lengths
        A checked call with new tokens.
    """
    most = int(lengths.new.max(initial=0))
    entry, token = np.nonzero(np.arange(most) < lengths.fitting[:, None])
    place = _places(call, entry, lengths.before[entry] + token)
    source = rows_of(call, entry, token)
    rows = call.native("k")[source]
    if call.interleaved is not None:
        tables = call.native("rotary_cos"), call.native("rotary_sin")
        rows = rotate(rows, lengths.positions[entry] + token, *tables, call.interleaved)
    values = call.native("v")[source]
    if call.scales is not None:
        rows, values = (
            quantised(x, _scales_of(call, name, entry))
            for x, name in ((rows, "k_scale"), (values, "v_scale"))
        )
    call.native("k_cache")[place] = rows
    call.native("v_cache")[place] = values
    if "overflow" in call.arrays:
        call.native("overflow")[...] = lengths.new - lengths.fitting


def rotated_queries(call: CacheCall, lengths: Lengths, advance: bool) -> _Array:
    """Return rotated queries.

    With ``advance`` each query is one position after the query before it; otherwise all queries
    are at the first position. A query beyond the tables becomes NaN.
    """
    q: _Array = call.native("q")
    tables = call.native("rotary_cos"), call.native("rotary_sin")
    if call.sizes.most_queries:
        positions = positions_of_rows(call, lengths, advance)
        return rotate(q, positions, *tables, bool(call.interleaved))
    further = np.arange(q.shape[1]) if advance else np.zeros(q.shape[1], np.int64)
    return rotate(q, lengths.positions[:, None] + further, *tables, bool(call.interleaved))


def held(call: CacheCall, lengths: Lengths) -> tuple[_Array, _Array, _Array]:
    """Return the keys and values of the used slots of every entry, and their number.

    They are views of the caches if no array moves entries or slots. Otherwise they
    are copies of the used slots: pages in order, without padding on the left. Masks
    and slopes use distances from the last key, which padding does not change.
    """
    k_cache, v_cache = call.native("k_cache"), call.native("v_cache")
    moved = {"page_table", "cache_batch_idx", "cache_leftpad"} & set(call.arrays)
    if not moved:
        if call.scales is not None:  # fewer bytes to convert to numbers
            most = int(lengths.after.max(initial=0))
            k_cache, v_cache = k_cache[:, :most], v_cache[:, :most]
        return k_cache, v_cache, lengths.after.astype(np.int32)
    count = np.maximum(lengths.after - lengths.padding, 0)
    entry, row = np.nonzero(np.arange(count.max(initial=0)) < count[:, None])
    place = _places(call, entry, lengths.padding[entry] + row)
    shape = call.sizes.batch, int(count.max(initial=0))
    gathered = []
    for cache in (k_cache, v_cache):
        rows = np.zeros((*shape, *cache.shape[2:]), cache.dtype)
        rows[entry, row] = cache[place]
        gathered.append(rows)
    return gathered[0], gathered[1], count.astype(np.int32)


def numbers_of(call: CacheCall, keys: _Array, values: _Array) -> tuple[_Array, _Array]:
    """Return float8 keys and values of :func:`held` as float32 numbers."""
    k_scale, v_scale = (
        of_each_head(name, _arrays(call), call.scales or ()) for name in ("k_scale", "v_scale")
    )
    return dequantised(keys, k_scale), dequantised(values, v_scale)


def _scales_of(call: CacheCall, name: str, entry: _Array) -> _Array:
    """Return a scale for each head of these entries of the batch."""
    scale = of_each_head(name, _arrays(call), call.scales or ())
    of_all = np.broadcast_to(scale, (call.sizes.batch, call.sizes.heads_kv))
    found: _Array = of_all[entry]
    return found


def _arrays(call: CacheCall) -> dict[str, _Array]:
    names = ("k_scale", "v_scale")
    return {name: call.native(name) for name in names if name in call.arrays}


def _places(call: CacheCall, entry: _Array, slot: _Array) -> tuple[_Array, _Array]:
    """Return the cache indices of slots of entries of the batch."""
    table = call.native("page_table")
    if table is not None:
        size = max(call.sizes.slots, 1)
        return table[entry, slot // size].astype(np.int64), slot % size
    rows = call.native("cache_batch_idx")
    return (entry if rows is None else rows[entry].astype(np.int64)), slot

"""Caches for :mod:`cuflash.reference`, token by token and row by row, from their definition."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import ArgumentValueError
from .reference_packed_caches import counts, packed_append, queries

__all__ = ["append_kv", "attention_with_kvcache"]

_Array = NDArray[Any]

#: What :func:`append_kv` takes beside the tokens and the caches.
_OF_APPEND = (
    *("cache_seqlens", "page_table", "cache_batch_idx", "rotary_cos", "rotary_sin"),
    *("rotary_interleaved", "rotary_seqlens", "k_scale", "v_scale"),
)


def append_kv(
    k: _Array,
    v: _Array,
    k_cache: _Array,
    v_cache: _Array,
    *,
    cache_seqlens: _Array,
    page_table: _Array | None = None,
    cache_batch_idx: _Array | None = None,
    rotary_cos: _Array | None = None,
    rotary_sin: _Array | None = None,
    rotary_interleaved: bool | None = None,
    rotary_seqlens: _Array | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> tuple[_Array, _Array, _Array]:
    """Copies of the caches with the new tokens, and the number that did not fit in each entry.

    Parameters
    ----------
    k, v : ndarray, (batch, new_tokens, heads_kv, head_dim or head_dim_v)
        The new tokens.
    k_cache, v_cache : ndarray, (entries, slots, heads_kv, ...)
        The caches, or pages. They are not changed.
    cache_seqlens : ndarray of integers, (batch,)
        Occupied slots.
    page_table : ndarray of integers, (batch, pages), optional
        Pages of every entry.
    cache_batch_idx : ndarray of integers, (batch,), optional
        Entries of the caches.
    rotary_cos, rotary_sin : ndarray, (positions, pairs), optional
        The angles by which keys are rotated.
    rotary_interleaved : bool
        Whether neighbouring columns form a pair.
    rotary_seqlens : ndarray of integers, (batch,), optional
        Position of the first new token.
    k_scale, v_scale : number or ndarray, (1,) or (batch, heads_kv), optional
        Scales of caches of float8 bytes: new keys, rotated and rounded to k's dtype, are
        divided by them in float32.

    Returns
    -------
    k_cache, v_cache : ndarray
        Of the given dtypes; rotated keys are rounded once.
    overflow : ndarray of int32, (batch,)
        The number of tokens without a slot or an angle. If the first position of an entry is
        negative, none of its tokens has an angle.

    Raises
    ------
    ArgumentValueError
        If there are tables but ``rotary_interleaved`` is None.
    """
    k_cache, v_cache = k_cache.copy(), v_cache.copy()
    overflow = np.zeros(len(k), np.int32)
    for b, i in np.ndindex(*k.shape[:2]):
        slot = int(cache_seqlens[b]) + i
        begin = int(cache_seqlens[b] if rotary_seqlens is None else rotary_seqlens[b])
        place, position = _place(b, slot, k_cache, page_table, cache_batch_idx), begin + i
        has_angles = _has_angles(begin, rotary_cos) and _has_angles(position, rotary_cos)
        if place is None or not has_angles:
            overflow[b] += 1
            continue
        turned = [_turned(x, position, rotary_cos, rotary_sin, rotary_interleaved) for x in k[b, i]]
        rows = np.reshape(turned, k_cache[place].shape).astype(k.dtype)
        k_cache[place] = _stored(rows, _scales(k_scale, b, len(rows)))
        v_cache[place] = _stored(v[b, i], _scales(v_scale, b, len(rows)))
    return k_cache, v_cache, overflow


def attention_with_kvcache(
    q: _Array,
    k_cache: _Array,
    v_cache: _Array,
    k: _Array | None = None,
    v: _Array | None = None,
    *,
    cache_seqlens: _Array,
    page_table: _Array | None = None,
    cache_batch_idx: _Array | None = None,
    cache_leftpad: _Array | None = None,
    rotary_cos: _Array | None = None,
    rotary_sin: _Array | None = None,
    rotary_interleaved: bool | None = None,
    rotary_seqlens: _Array | None = None,
    cu_seqlens_q: _Array | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: _Array | None = None,
    sinks: _Array | None = None,
    scale: float | None = None,
) -> tuple[_Array, _Array, _Array, _Array, _Array]:
    """Attention over the caches after the append, in float64.

    Parameters
    ----------
    q : ndarray, (batch, seqlen_q, heads_q, head_dim), or packed (total_q, heads_q, head_dim)
        Queries. Rotated queries are rounded to q's dtype, as keys are to the cache's.
    k_cache, v_cache, k, v, cache_seqlens, page_table, cache_batch_idx
        As for :func:`append_kv`.
    rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens, k_scale, v_scale
        As for :func:`append_kv`.
    cu_seqlens_q : ndarray of integers, (batch + 1,), optional
        Packed rows: entry b has the rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` of q, k
        and v.
    cache_leftpad : ndarray of integers, (batch,), optional
        Slots at the beginning that do not count; the length includes them.
    causal, window_size, softcap, alibi_slopes, sinks, scale
        As for :func:`attention`.

    Returns
    -------
    out : ndarray, (batch, seqlen_q, heads_q, head_dim_v), or (total_q, heads_q, head_dim_v)
    lse : ndarray, (batch, heads_q, seqlen_q), or (heads_q, total_q)
    k_cache, v_cache, overflow : ndarray
        As for :func:`append_kv`.

    Notes
    -----
    Let L be the length after the append: the length before it plus the number of tokens that fit.
    Query i is at slot ``p = i + L - seqlen_q``, where packed queries have the number of their
    entry's queries in place of seqlen_q. It sees slot j iff ``leftpad <= j < L`` and
    ``p - left <= j <= p + right``.
    """
    given = {name: value for name, value in locals().items() if name in _OF_APPEND}
    batch, heads, d = len(cache_seqlens), q.shape[-2], q.shape[-1]
    overflow, new = np.zeros(batch, np.int32), np.zeros(batch, int)
    if k is not None and v is not None:
        append = append_kv if cu_seqlens_q is None else packed_append(append_kv, cu_seqlens_q)
        k_cache, v_cache, overflow = append(k, v, k_cache, v_cache, **given)
        new += k.shape[1] if cu_seqlens_q is None else np.array(counts(cu_seqlens_q, len(q)))
    out, lse = np.zeros((*q.shape[:-1], v_cache.shape[3])), np.full(q.shape[:-1], -math.inf)
    window = (None, None) if window_size is None else window_size
    sides = (window[0], 0 if causal else window[1])
    slopes = np.broadcast_to(0.0 if alibi_slopes is None else alibi_slopes, (batch, heads))
    factor = 1 / math.sqrt(d) if scale is None else scale
    every = ((row, h) for row in queries(q, cu_seqlens_q) for h in range(heads))
    for (place, b, i, count), h in every:
        begin = int(cache_seqlens[b] if rotary_seqlens is None else rotary_seqlens[b])
        position = begin + i * (sides != (None, None))
        row = _turned(q[place][h], position, rotary_cos, rotary_sin, rotary_interleaved)
        length = int(cache_seqlens[b] + new[b] - overflow[b])
        stands = i + length - count
        first = 0 if cache_leftpad is None else int(cache_leftpad[b])
        seen = [j for j in range(first, length) if _sees(stands, j, sides)]
        places = [_place(b, j, k_cache, page_table, cache_batch_idx) for j in seen]
        at = places, h // (heads // k_cache.shape[2]), b
        keys, values = _rows(k_cache, *at, k_scale), _rows(v_cache, *at, v_scale)
        scores = factor * (keys @ row.astype(q.dtype).astype(float))
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        scores = scores - float(slopes[b, h]) * np.abs(stands - np.array(seen, float))
        sink = -math.inf if sinks is None else float(sinks[h])
        out[place][h], lse[place][h] = _softmax(scores, values, sink)
    return out, lse.swapaxes(-1, -2), k_cache, v_cache, overflow


def _rows(cache: _Array, places: list[Any], head: int, b: int, scale: Any) -> _Array:
    """The rows of a head at these places."""
    scales = _scales(scale, b, cache.shape[2])
    rows = np.array([cache[place][head] for place in places]).reshape(-1, cache.shape[3])
    if scales is None:
        return rows.astype(float)
    numbers: _Array = _float8_numbers()[rows.astype(int)] * float(scales[head])
    return numbers


def _scales(scale: Any, b: int, heads: int) -> _Array | None:
    """The scale of each head of an entry, float32; None for caches that are not bytes."""
    if scale is None:
        return None
    given: _Array = np.asarray(scale, np.float32)
    return given[b] if given.ndim == 2 else np.full(heads, given.reshape(-1)[0])


def _float8_numbers() -> _Array:
    """The number of each of the 256 bytes: float8_e4m3fn by its definition."""
    found = []
    for byte in range(256):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        size = (8 + mantissa if exponent else mantissa) * 2.0 ** (max(exponent, 1) - 10)
        size = math.nan if byte & 127 == 127 else size
        found.append(-size if byte & 128 else size)
    return np.array(found)


def _stored(rows: _Array, scales: _Array | None) -> _Array:
    """Rows of heads unchanged, or the byte nearest to each number divided by its scale.

    A tie goes to the byte whose last bit is 0; a number beyond the largest becomes the largest.
    """
    if scales is None:
        return rows
    sizes = _float8_numbers()[:127]
    bytes_of = np.full(rows.shape, 127, np.uint8)
    for head, column in np.ndindex(*rows.shape):
        with np.errstate(over="ignore"):
            x = np.float32(rows[head, column]) / scales[head]
        if np.isnan(x):
            continue
        far = np.abs(sizes - min(abs(float(x)), 448.0))
        nearest = [int(byte) for byte in np.flatnonzero(far == far.min())]
        bytes_of[head, column] = min(nearest, key=lambda byte: byte & 1) + 128 * np.signbit(x)
    return bytes_of


def _softmax(scores: _Array, values: _Array, sink: float) -> tuple[Any, float]:
    """A row's output and log-sum-exp."""
    largest = max([*scores.tolist(), sink])
    if np.isnan(scores).any():
        return np.nan, np.nan
    if largest == -math.inf or not len(scores):
        return 0.0, sink
    weights = np.exp(scores - largest)
    total = weights.sum() + math.exp(sink - largest)
    return weights @ values / total, largest + math.log(total)


def _sees(stands: int, j: int, sides: tuple[int | None, int | None]) -> bool:
    left, right = sides
    return (left is None or j >= stands - left) and (right is None or j <= stands + right)


def _place(
    b: int, slot: int, cache: _Array, page_table: _Array | None, cache_batch_idx: _Array | None
) -> tuple[int, int] | None:
    """The place of a slot of a batch entry; None if the slot does not exist."""
    if page_table is not None:
        page, within = divmod(slot, cache.shape[1])
        return (int(page_table[b, page]), within) if page < page_table.shape[1] else None
    entry = b if cache_batch_idx is None else int(cache_batch_idx[b])
    return (entry, slot) if slot < cache.shape[1] else None


def _has_angles(position: int, cos: _Array | None) -> bool:
    return cos is None or 0 <= position < len(cos)


def _turned(
    row: _Array, position: int, cos: _Array | None, sin: _Array | None, interleaved: bool | None
) -> _Array:
    """A row rotated by the angles of its position, in the dtype of the tables."""
    if cos is None or sin is None:
        return row
    if interleaved is None:
        raise ArgumentValueError("rotary_interleaved", "None", "True or False")
    turned = row.astype(cos.dtype)
    for pair in range(cos.shape[1]):
        at = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + cos.shape[1])
        x, y = turned[list(at)]
        if not _has_angles(position, cos):
            turned[list(at)] = np.nan
            continue
        c, s = cos[position, pair], sin[position, pair]
        turned[list(at)] = x * c - y * s, x * s + y * c
    return turned

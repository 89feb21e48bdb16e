"""Changes of scores before the softmax, from their definition, for :mod:`cuflash.reference`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Places", "add_pairs", "cap_slopes", "capped", "distances", "function_of", "in_blocks"]

_Array = NDArray[Any]


class Places:
    """The positions of the queries and keys of every entry, and which of them count.

    Parameters
    ----------
    lengths : mapping
        "seqused_q" and "seqused_kv": the number that count in every entry, (batch,), or None.
    sizes : tuple of int
        (batch, heads_q, seqlen_q, seqlen_kv).
    causal, window, q_offset
        As for :func:`cuflash.reference.attention`.

    Attributes
    ----------
    i, j : ndarray
        Queries, (seqlen_q, 1), and keys, (1, seqlen_kv).
    queries, keys : ndarray, (batch,)
        The number that count.
    offsets : ndarray, (batch,)
        The position of query 0 among the keys.
    """

    def __init__(
        self,
        lengths: Mapping[str, _Array | None],
        sizes: tuple[int, ...],
        causal: bool,
        window: tuple[int | None, int | None] | None,
        q_offset: int | None,
    ) -> None:
        batch, _, rows, keys = sizes
        self.i, self.j = np.arange(rows)[:, None], np.arange(keys)[None, :]
        self.queries = _counted(lengths["seqused_q"], batch, rows)
        self.keys = _counted(lengths["seqused_kv"], batch, keys)
        self.offsets = self.keys - self.queries
        if q_offset is not None:
            self.offsets = np.full(batch, q_offset)
        self._causal, self._window = causal, window

    def visible(self, b: int) -> _Array:
        """Whether query i and key j of an entry count, and i sees j; (seqlen_q, seqlen_kv)."""
        left, right = self._window or (None, None)
        ahead = self.j - (self.i + int(self.offsets[b]))
        seen: _Array = (self.i < self.queries[b]) & (self.j < self.keys[b])
        if self._causal:
            seen &= ahead <= 0
        if right is not None:
            seen &= ahead <= right
        if left is not None:
            seen &= ahead >= -left
        return seen


def _counted(lengths: _Array | None, batch: int, seqlen: int) -> _Array:
    """The number of rows that count in every batch entry; all of them without lengths."""
    given = np.full(batch, seqlen) if lengths is None else lengths.astype(np.int64)
    rows: _Array = np.minimum(np.maximum(given, 0), seqlen)
    return rows


def capped(scores: _Array, cap: np.floating[Any]) -> _Array:
    """``cap * tanh(scores / cap)``; the scores themselves where the cap is 0."""
    return cap * np.tanh(scores / cap) if cap else scores


def cap_slopes(scores: _Array, cap: np.floating[Any]) -> _Array:
    """The derivative of every capped score by the score: ``1 / cosh(scores / cap)^2``."""
    slopes: _Array = 1 / np.cosh(scores / cap) ** 2 if cap else np.ones_like(scores)
    return slopes


class _Arguments:
    """The arguments of a score function; an index outside its axis reads the nearest element."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        for name, value in arguments.items():
            is_number = isinstance(value, (int, float))
            setattr(self, name, value if is_number else _reader(_widened(np.asarray(value))))


def _widened(array: _Array) -> _Array:
    """Integers and booleans unchanged; real numbers of any type as float64."""
    return array if array.dtype.kind in "iub" else array.astype(np.float64)


def _reader(array: _Array) -> Callable[..., _Array]:
    def element(*indices: Any) -> _Array:
        inside = (
            np.minimum(np.maximum(index, 0), size - 1)
            for index, size in zip(indices, array.shape, strict=True)
        )
        return np.asarray(array[tuple(inside)])

    return element


#: Weights of f(s + n h) - f(s - n h), n = 1 to 4, in h f'(s): exact for polynomials of degree 8
#: (Fornberg, "Generation of finite difference formulas on arbitrarily spaced grids", 1988).
_WEIGHTS = (4 / 5, -1 / 5, 4 / 105, -1 / 280)
_STEP = 2.0**-8


def function_of(given: Any, places: tuple[_Array, _Array, _Array]) -> Function | None:
    """A score function from its NumPy function and its arguments; None without one."""
    if given is None:
        return None
    function, arguments = given
    return Function(function, arguments, places)


class Function:
    """A score function, applied to one head at a time.

    Parameters
    ----------
    function, arguments
        The function of NumPy arrays, and its arguments by name.
    places : (ndarray, ndarray, ndarray)
        Queries, (seqlen_q, 1), keys, (1, seqlen_kv), and the position of query 0 of every entry
        among the keys, (batch,).
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        places: tuple[_Array, _Array, _Array],
    ) -> None:
        self._function, self._arguments = function, _Arguments(arguments)
        *self._places, self._offsets = places

    def of(self, scores: _Array, b: int, h: int) -> _Array:
        """The changed scores of a head."""
        entry, head = np.full((1, 1), b), np.full((1, 1), h)
        places = (*self._places, int(self._offsets[b]))
        changed = self._function(scores, entry, head, *places, self._arguments)
        whole: _Array = np.broadcast_to(changed, scores.shape).astype(scores.dtype)
        return whole

    def slopes(self, scores: _Array, b: int, h: int) -> _Array:
        """The derivatives of the function there, by differences; 0 where a pair is hidden."""
        wide = scores.astype(np.longdouble)
        total = np.zeros_like(wide)
        for n, weight in enumerate(_WEIGHTS, 1):
            step = np.longdouble(n * _STEP)
            total += weight * (self.of(wide + step, b, h) - self.of(wide - step, b, h))
        hidden = self.of(wide, b, h) == -np.inf
        slopes: _Array = np.where(hidden, 0, total / np.longdouble(_STEP)).astype(scores.dtype)
        return slopes


def distances(i: _Array, j: _Array, q_offset: int) -> _Array:
    """The distance from key ``i + q_offset``, the position of query i, to key j."""
    away: _Array = np.abs(i + q_offset - j)
    return away


def in_blocks(blocks: _Array, block: tuple[int, int], i: _Array, j: _Array) -> _Array:
    """Whether query i and key j are in a block that is not 0, for all queries and keys.

    Parameters
    ----------
    blocks : ndarray, broadcasts against (batch, heads_q, q_blocks, kv_blocks)
        The blocks, each of ``block[0]`` queries and ``block[1]`` keys.
    """
    sizes = (-(-i.size // block[0]), -(-j.size // block[1]))
    whole = np.broadcast_to(blocks != 0, np.broadcast_shapes(blocks.shape, sizes))
    shown: _Array = whole[..., i // block[0], j // block[1]]
    return shown


def add_pairs(total: _Array, b: int, h: int, pairs: _Array) -> None:
    """Add the pairs of one head to an array that broadcasts, summed over its axes of size 1.

    Parameters
    ----------
    total : ndarray
        An array that broadcasts against (batch, heads_q, seqlen_q, seqlen_kv).
    b, h : int
        Batch entry and head of the pairs.
    pairs : ndarray, (seqlen_q, seqlen_kv)
        The numbers to add.
    """
    whole = total[(None,) * (4 - total.ndim)]
    entry, head = (at if size > 1 else 0 for at, size in zip((b, h), whole.shape, strict=False))
    for axis, size in enumerate(whole.shape[2:]):
        if size == 1:
            pairs = pairs.sum(axis=axis, keepdims=True)
    whole[entry, head] += pairs

"""What is done to scores before the softmax, from its definition, for :mod:`cuflash.reference`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["add_pairs", "cap_slopes", "capped", "distances", "function_of", "in_blocks", "sees"]

_Array = NDArray[Any]


def sees(
    i: _Array, j: _Array, causal: bool, window: tuple[int | None, int | None] | None, q_offset: int
) -> _Array:
    """Whether query i, which stands at key ``i + q_offset``, sees key j."""
    left, right = window or (None, None)
    ahead = j - (i + q_offset)
    seen = np.ones(ahead.shape, bool)
    if causal:
        seen &= ahead <= 0
    if right is not None:
        seen &= ahead <= right
    if left is not None:
        seen &= ahead >= -left
    return seen


def capped(scores: _Array, cap: np.floating[Any]) -> _Array:
    """``cap * tanh(scores / cap)``; the scores themselves where the cap is 0."""
    return cap * np.tanh(scores / cap) if cap else scores


def cap_slopes(scores: _Array, cap: np.floating[Any]) -> _Array:
    """The derivative of every capped score by the score: ``1 / cosh(scores / cap)^2``."""
    slopes: _Array = 1 / np.cosh(scores / cap) ** 2 if cap else np.ones_like(scores)
    return slopes


class _Arguments:
    """What a function of scores reads; an index outside its axis reads the nearest element."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        for name, value in arguments.items():
            is_number = isinstance(value, (int, float))
            setattr(self, name, value if is_number else _reader(_widened(np.asarray(value))))


def _widened(array: _Array) -> _Array:
    """Integers and booleans as they are, real numbers of any type as float64."""
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


def function_of(given: Any, places: tuple[_Array, _Array, int]) -> Function | None:
    """A function of scores from what NumPy calls, and what that reads; None without one."""
    if given is None:
        return None
    function, arguments = given
    return Function(function, arguments, places)


class Function:
    """A function of scores of one head after the other.

    Parameters
    ----------
    function, arguments
        Of NumPy arrays, and what it reads by name.
    places : (ndarray, ndarray, int)
        Queries, (seqlen_q, 1), keys, (1, seqlen_kv), and the key that query 0 stands at.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        places: tuple[_Array, _Array, int],
    ) -> None:
        self._function, self._arguments = function, _Arguments(arguments)
        self._places = places

    def of(self, scores: _Array, b: int, h: int) -> _Array:
        """What scores of a head become."""
        entry, head = np.full((1, 1), b), np.full((1, 1), h)
        changed = self._function(scores, entry, head, *self._places, self._arguments)
        whole: _Array = np.broadcast_to(changed, scores.shape).astype(scores.dtype)
        return whole

    def slopes(self, scores: _Array, b: int, h: int) -> _Array:
        """Its derivatives there, by differences; 0 where a pair is hidden."""
        wide = scores.astype(np.longdouble)
        total = np.zeros_like(wide)
        for n, weight in enumerate(_WEIGHTS, 1):
            step = np.longdouble(n * _STEP)
            total += weight * (self.of(wide + step, b, h) - self.of(wide - step, b, h))
        hidden = self.of(wide, b, h) == -np.inf
        slopes: _Array = np.where(hidden, 0, total / np.longdouble(_STEP)).astype(scores.dtype)
        return slopes


def distances(i: _Array, j: _Array, q_offset: int) -> _Array:
    """Keys from the one that query i stands at, ``i + q_offset``, to key j, in either direction."""
    away: _Array = np.abs(i + q_offset - j)
    return away


def in_blocks(blocks: _Array, block: tuple[int, int], i: _Array, j: _Array) -> _Array:
    """Whether query i and key j are in a block that is not 0; ``i`` of all queries, as ``j``.

    Parameters
    ----------
    blocks : ndarray, broadcasts against (batch, heads_q, q_blocks, kv_blocks)
        Of blocks of so many queries and keys.
    """
    sizes = (-(-i.size // block[0]), -(-j.size // block[1]))
    whole = np.broadcast_to(blocks != 0, np.broadcast_shapes(blocks.shape, sizes))
    shown: _Array = whole[..., i // block[0], j // block[1]]
    return shown


def add_pairs(total: _Array, b: int, h: int, pairs: _Array) -> None:
    """Add numbers of all pairs of one head to an array that broadcasts, summed over its axes of 1.

    Parameters
    ----------
    total : ndarray
        Broadcasts against (batch, heads_q, seqlen_q, seqlen_kv).
    b, h : int
        Entry and head of the pairs.
    pairs : ndarray, (seqlen_q, seqlen_kv)
        What is added.
    """
    whole = total[(None,) * (4 - total.ndim)]
    entry, head = (at if size > 1 else 0 for at, size in zip((b, h), whole.shape, strict=False))
    for axis, size in enumerate(whole.shape[2:]):
        if size == 1:
            pairs = pairs.sum(axis=axis, keepdims=True)
    whole[entry, head] += pairs

"""What is done to scores before the softmax, from its definition, for :mod:`cuflash.reference`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["add_pairs", "cap_slopes", "capped", "distances", "in_blocks", "sees"]

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

"""Dropout from its definition, for :mod:`cuflash.reference`.

The generator is called for every pair separately. Pairs that share a call in the library have the
same counter here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["dropped"]

_Array = NDArray[Any]

_WORD = 2**32


def dropped(
    p: float, seed: Any, head: int, rows: int, keys: int, dtype: type[np.floating[Any]]
) -> _Array:
    """The factors of a head's weights: 0, or 1 over the share that is kept.

    Parameters
    ----------
    p : float
        The dropped share, rounded to a multiple of 2^-14.
    seed : int or ndarray
        As for :func:`cuflash.attention`.
    head : int
        The head's number among the heads of all entries.
    rows, keys : int
        Queries and keys.
    dtype : type
        The type of the result, (rows, keys).
    """
    kept = round((1 - p) * 2**14)
    i, j = np.arange(rows, dtype=np.uint64)[:, None], np.arange(keys, dtype=np.uint64)
    key0, key1, offset = _numbers(seed)
    counter: list[Any] = [j // 16 * 4 + j % 8 // 2, i // 16 * 8 + i % 8, head, offset]
    words = np.stack(
        _philox([np.broadcast_to(np.uint64(c), (rows, keys)) for c in counter], key0, key1)
    )
    word = np.take_along_axis(words, (i // 8 % 2 + j // 8 % 2 * 2)[None].astype(np.int64), 0)[0]
    draw = word // np.where(j % 2 == 1, 2**16, 1).astype(np.uint64) % 2**14
    share: _Array = np.where(draw < kept, dtype(2**14) / dtype(kept), dtype(0))
    return share


def _numbers(seed: Any) -> tuple[int, int, int]:
    """Both words of the key, and the offset."""
    if not isinstance(seed, np.ndarray):
        return int(seed) % _WORD, int(seed) // _WORD, 0
    first, second, third, fourth = [*map(int, seed), 0, 0][:4]
    return first ^ fourth, second, third


def _philox(counter: list[_Array], key0: int, key1: int) -> list[_Array]:
    """Seven rounds of philox4x32 (Salmon et al. 2011, section 4.3)."""
    right0, left0, right1, left1 = counter
    for step in range(7):
        weyl0 = (key0 + step * 0x9E3779B9) % _WORD
        weyl1 = (key1 + step * 0xBB67AE85) % _WORD
        product0, product1 = right0 * np.uint64(0xD2511F53), right1 * np.uint64(0xCD9E8D57)
        right0, left0, right1, left1 = (
            product1 // _WORD ^ left0 ^ np.uint64(weyl0),
            product1 % _WORD,
            product0 // _WORD ^ left1 ^ np.uint64(weyl1),
            product0 % _WORD,
        )
    return [right0, left0, right1, left1]

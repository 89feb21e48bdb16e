"""Philox: random words that depend only on a counter and a key.

Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011. This is their
generator philox4x32 with any number of rounds. With 7 it passes all tests of TestU01's BigCrush;
the authors' library uses 10 as a reserve.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["philox4x32"]

_Words = npt.NDArray[np.uint64]

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
#: Added to the words of the key in each round: the golden ratio and the root of 3, less 1.
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOWER, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox4x32(
    counter: Sequence[Any], key: Sequence[int], rounds: int
) -> tuple[_Words, _Words, _Words, _Words]:
    """Four random 32-bit words for every counter.

    Parameters
    ----------
    counter
        Four numbers, or arrays of numbers, below 2^32; they broadcast.
    key
        Two numbers below 2^32.
    rounds
        The number of rounds, at least 1.

    Returns
    -------
    tuple of ndarray
        uint64, of the shape to which the counter broadcasts.
    """
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in counter)
    for i in range(rounds):
        k0, k1 = (
            np.uint64((int(word) + i * step) & 0xFFFFFFFF)
            for word, step in zip(key, _WEYL, strict=True)
        )
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c2 = (second >> _HALF) ^ c1 ^ k0, (first >> _HALF) ^ c3 ^ k1
        c1, c3 = second & _LOWER, first & _LOWER
    every = np.broadcast_arrays(c0, c1, c2, c3)
    return every[0], every[1], every[2], every[3]

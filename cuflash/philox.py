"""Philox: random words that are a function of a counter and a key, and of nothing else.

Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011. Of
its generators this is philox4x32, in any number of rounds: with 7 it passes all tests
of TestU01's BigCrush, 10 are what the authors' library takes for a reserve.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["philox4x32"]

_Words = npt.NDArray[np.uint64]

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
#: What a round adds to the words of the key: the golden ratio and the root of 3, less 1.
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOWER, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox4x32(
    counter: Sequence[Any], key: Sequence[int], rounds: int
) -> tuple[_Words, _Words, _Words, _Words]:
    """Four random words of 32 bits of every counter.

    Parameters
    ----------
    counter
        Four numbers or arrays of numbers below 2^32, which broadcast.
    key
        Two numbers below 2^32.
    rounds
        How many, 1 at least.

    Returns
    -------
    tuple of ndarray
        Of the shape that the counter broadcasts to, as uint64.
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

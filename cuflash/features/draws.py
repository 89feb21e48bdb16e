"""The pairs that dropout keeps: random bits that depend only on the pair's position.

One call of Philox serves eight pairs: those that one lane holds of an operand of 16 queries by 16
keys. Query i and key j of head h of entry b have the counter ``(j / 16 * 4 + j % 8 / 2, i / 16 * 8
+ i % 8, b * heads + h, offset)``. The pair uses word ``i / 8 % 2 + 2 * (j / 8 % 2)`` of the four
words: the lower half if j is even, else the upper half. 14 bits of that half are the draw, and a
pair is kept if its draw is below a limit. ``cuda_src/features/dropout.cuh`` draws the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..philox import philox4x32

__all__ = ["DRAWS", "ROUNDS", "Stream", "draws", "limit_of", "stream_of"]

#: Rounds of Philox.
ROUNDS = 7
#: The number of different draws.
DRAWS = 2**14

#: The two words of the key, and the last word of the counter.
Stream = tuple[int, int, int]

_BLOCK = 16  # queries or keys that share calls


def limit_of(p: float) -> int:
    """The number of draws that keep a pair."""
    return round(DRAWS * (1 - p))


def stream_of(words: Sequence[Any]) -> Stream:
    """The key and the offset from the words of a seed; an offset has its lower word first.

    The upper word of the offset changes the key: the counter has no room for it.
    """
    lower, upper, *offset = map(int, words[:4])
    if not offset:
        return lower, upper, 0
    return lower ^ offset[1], upper, offset[0]


def draws(
    stream: Stream, heads: npt.NDArray[Any], queries: slice, keys: slice
) -> npt.NDArray[np.uint16]:
    """The draws of all pairs of some queries and keys.

    Parameters
    ----------
    stream
        The stream of the seed.
    heads
        ``b * heads + h`` of some entries and heads.
    queries, keys
        Ranges of queries and of keys.

    Returns
    -------
    ndarray
        Numbers below :data:`DRAWS`, with the axes of ``heads``, then query and key.
    """
    *key, offset = stream
    of_queries, of_keys = _calls(queries, 8), _calls(keys, 4)
    of_heads = np.asarray(heads).astype(np.uint64)[..., None, None]
    counter = (of_keys, of_queries[:, None], of_heads, offset)
    words = philox4x32(counter, key, ROUNDS)
    shape = (*words[0].shape[:-2], of_queries.size // 8, 8, of_keys.size // 4, 4)
    # Axes of a block: query / 8 % 2, query % 8, key / 8 % 2, key % 8 / 2, key % 2.
    split = (*shape[:-4], shape[-4], 2, 8, shape[-2], 2, 4, 2)
    found = np.empty(split, np.uint16)
    for number, word in enumerate(words):
        part = found[..., number % 2, :, :, number // 2, :, :]
        both = word.reshape(shape)
        for half in range(2):
            part[..., half] = both >> np.uint64(16 * half) & np.uint64(DRAWS - 1)
    blocks = found.reshape(*shape[:-4], shape[-4] * _BLOCK, shape[-2] * _BLOCK)
    first, last = queries.start % _BLOCK, keys.start % _BLOCK
    rows = slice(first, first + queries.stop - queries.start)
    return blocks[..., rows, last : last + keys.stop - keys.start]


def _calls(run: slice, of_block: int) -> npt.NDArray[np.uint64]:
    """The counter words of all blocks that a range touches, ``of_block`` words per block."""
    first, end = run.start // _BLOCK, -(-run.stop // _BLOCK)
    return np.arange(first * of_block, max(first, end) * of_block, dtype=np.uint64)

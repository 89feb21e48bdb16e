"""The lengths of the timed packed batches, which are the same in all runs."""

from __future__ import annotations

import functools

import numpy as np

__all__ = ["equal_entries", "lengths_of", "offsets_of"]

#: Tokens of a batch that is cut into sequences.
TOKENS = 32768
#: The shortest and the longest possible sequence of the mix, and its number of sequences.
SHORTEST, LONGEST, MIXED = 16, 8192, 512


@functools.cache
def lengths_of(kind: str) -> tuple[int, ...]:
    """The lengths of all sequences: ``cut-N``, ``equal-N`` or ``zipf``.

    ``cut-N`` cuts 32,768 tokens at N - 1 random positions, ``equal-N`` into equal parts. The mix
    has 512 sequences of 16 to 8192 tokens, few of them long: a length n has a probability
    proportional to n ** -1.5.
    """
    name, _, count = kind.partition("-")
    if name == "equal":
        return (TOKENS // int(count),) * int(count)
    if name == "cut":
        places = np.random.default_rng(0).choice(np.arange(1, TOKENS), int(count) - 1, False)
        return tuple(np.diff(np.sort(places), prepend=0, append=TOKENS).tolist())
    lengths = np.arange(SHORTEST, LONGEST + 1)
    weights = lengths**-1.5
    drawn = np.random.default_rng(0).choice(lengths, MIXED, p=weights / weights.sum())
    return tuple(drawn.tolist())


def offsets_of(kind: str) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Where the sequences begin, and where the last one ends."""
    return np.cumsum([0, *lengths_of(kind)], dtype=np.int32)


def equal_entries(kind: str | None) -> int:
    """The number of entries of a plain batch that is the same problem; 0 if there is none."""
    lengths = () if kind is None else lengths_of(kind)
    return len(lengths) if len(set(lengths)) == 1 else 0

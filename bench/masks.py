"""The boolean masks that are timed: an array of every kind, and how many pairs it shows."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

__all__ = ["BLOCK", "KINDS", "part_shown", "shown", "shown_blocks"]

#: Queries and keys of a block of the kind ``blocks``, of which one in so many is shown.
BLOCK, ONE_IN = 128, 4
#: Parts of the keys that padding leaves to the entries of a batch, in turns.
LEFT = (1 / 2, 3 / 4)


def shown(kind: str, batch: int, seqlen_q: int, seqlen_kv: int) -> Any:
    """A mask on the host, with all axes; what entries or queries share is there once.

    What is drawn is the same in every run, and on every device.
    """
    return KINDS[kind](batch, seqlen_q, seqlen_kv)


@functools.cache
def part_shown(kind: str, batch: int, seqlen_q: int, seqlen_kv: int) -> float:
    """Pairs that a mask shows over all; half if causal, as they are counted without an array."""
    if kind == "causal":
        return 0.5
    return float(shown(kind, batch, seqlen_q, seqlen_kv).mean())


def _causal(batch: int, seqlen_q: int, seqlen_kv: int) -> Any:
    """What ``causal=True`` shows: the last query stands at the last key."""
    return np.tri(seqlen_q, seqlen_kv, seqlen_kv - seqlen_q, dtype=bool)[None, None]


def _random_half(batch: int, seqlen_q: int, seqlen_kv: int) -> Any:
    """Every pair with probability one half: no tile of any size is hidden whole, or shown whole."""
    drawn = np.random.default_rng(2).integers(0, 2, (seqlen_q, seqlen_kv), dtype=bool)
    return drawn[None, None]


def _padding(batch: int, seqlen_q: int, seqlen_kv: int) -> Any:
    """Entries that are shorter than the array that they stand in."""
    lengths = np.resize(LEFT, batch) * seqlen_kv
    return np.arange(seqlen_kv) < lengths[:, None, None, None]


def _blocks(batch: int, seqlen_q: int, seqlen_kv: int) -> Any:
    """Blocks that are shown whole or hidden whole: those of the diagonal, and others drawn."""
    pairs = shown_blocks(seqlen_q, seqlen_kv).repeat(BLOCK, axis=-2).repeat(BLOCK, axis=-1)
    return pairs[..., :seqlen_q, :seqlen_kv]


def shown_blocks(seqlen_q: int, seqlen_kv: int) -> Any:
    """Of the kind ``blocks`` a number for each block, with all axes."""
    blocks = np.eye(-(-seqlen_q // BLOCK), -(-seqlen_kv // BLOCK), dtype=bool)
    others = np.random.default_rng(3).permutation(np.flatnonzero(~blocks))
    more = max(0, blocks.size // ONE_IN - int(blocks.sum()))
    blocks.flat[others[:more]] = True
    return blocks[None, None]


#: By name.
KINDS = {
    "causal": _causal,
    "random-half": _random_half,
    "padding": _padding,
    "blocks": _blocks,
}

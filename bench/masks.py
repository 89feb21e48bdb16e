"""The timed boolean masks: an array of every kind, and the share of pairs that it shows."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

__all__ = ["BLOCK", "KINDS", "part_shown", "shown", "shown_blocks"]

#: Queries and keys of a block of the kind ``blocks``; one block in ``ONE_IN`` is shown.
BLOCK, ONE_IN = 128, 4
#: The shares of the keys that padding leaves visible; batch entries take the shares in turn.
LEFT = (1 / 2, 3 / 4)


def shown(kind: str, batch: int, seqlen_q: int, seqlen_kv: int) -> Any:
    """A mask on the host with four axes; an axis along which it is constant may have length 1.

    Random masks are the same in every run and on every device.
    """
    return KINDS[kind](batch, seqlen_q, seqlen_kv)


@functools.cache
def part_shown(kind: str, batch: int, seqlen_q: int, seqlen_kv: int) -> float:
    """The share of pairs that a mask shows; one half for a causal mask, as for ``causal=True``."""
    if kind == "causal":
        return 0.5
    return float(shown(kind, batch, seqlen_q, seqlen_kv).mean())


def _causal(batch: int, seqlen_q: int, seqlen_kv: int) -> Any:
    """The pairs of ``causal=True``: the last query is at the last key."""
    return np.tri(seqlen_q, seqlen_kv, seqlen_kv - seqlen_q, dtype=bool)[None, None]


def _random_half(batch: int, seqlen_q: int, seqlen_kv: int) -> Any:
    """Every pair with probability one half: no tile is hidden or shown entirely."""
    drawn = np.random.default_rng(2).integers(0, 2, (seqlen_q, seqlen_kv), dtype=bool)
    return drawn[None, None]


def _padding(batch: int, seqlen_q: int, seqlen_kv: int) -> Any:
    """Entries that are shorter than their array."""
    lengths = np.resize(LEFT, batch) * seqlen_kv
    return np.arange(seqlen_kv) < lengths[:, None, None, None]


def _blocks(batch: int, seqlen_q: int, seqlen_kv: int) -> Any:
    """Blocks that are shown or hidden as a whole: the diagonal and random others are shown."""
    pairs = shown_blocks(seqlen_q, seqlen_kv).repeat(BLOCK, axis=-2).repeat(BLOCK, axis=-1)
    return pairs[..., :seqlen_q, :seqlen_kv]


def shown_blocks(seqlen_q: int, seqlen_kv: int) -> Any:
    """Whether each block of the kind ``blocks`` is shown, (1, 1, blocks of queries and of keys)."""
    blocks = np.eye(-(-seqlen_q // BLOCK), -(-seqlen_kv // BLOCK), dtype=bool)
    others = np.random.default_rng(3).permutation(np.flatnonzero(~blocks))
    more = max(0, blocks.size // ONE_IN - int(blocks.sum()))
    blocks.flat[others[:more]] = True
    return blocks[None, None]


#: Kinds by name.
KINDS = {
    "causal": _causal,
    "random-half": _random_half,
    "padding": _padding,
    "blocks": _blocks,
}

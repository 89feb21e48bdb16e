"""Problems with caches whose queries are packed: those of each entry are of a number of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from .caches import Built, CacheCase, build, cases

__all__ = ["PackedCase", "build_packed", "offsets_of", "packed_cases"]

#: A case, the queries of each of its entries, and the rows behind them all.
PackedCase = tuple[CacheCase, tuple[int, ...], int]


def offsets_of(counts: tuple[int, ...]) -> Any:
    """Where the queries of entries begin, and where the last ones end."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def build_packed(case: CacheCase, counts: tuple[int, ...], behind: int = 0) -> Built:
    """The arrays of a problem; rows behind the last entry's are NaN.

    An entry has the same queries as in the problem without packing.
    """
    assert len(counts) == case.batch
    built = build(replace(case, queries=max(1, *counts)))
    q = built.arrays["q"]
    rows = [q[b, :count] for b, count in enumerate(counts)]
    rows.append(np.full((behind, *q.shape[2:]), np.nan, q.dtype))
    arrays = built.arrays | {"q": np.concatenate(rows), "cu_seqlens_q": offsets_of(counts)}
    return replace(built, arrays=arrays)


@st.composite
def packed_cases(draw: Any, **kinds: Any) -> PackedCase:
    """Small problems: entries without queries, with more than keys, and rows of no entry."""
    case = draw(cases(appends=False, **kinds))
    case = replace(case, new=None, pairs=0, positions=None, counts=False)
    longest = max(case.lengths)
    number = st.one_of(st.integers(0, 4), st.sampled_from([longest, longest + 1]))
    counts = tuple(draw(number) for _ in case.lengths)
    return case, counts, draw(st.integers(0, 3))

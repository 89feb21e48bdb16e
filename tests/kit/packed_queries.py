"""Problems with caches whose queries are packed: every entry has its own number of queries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from .caches import Built, CacheCase, build, cases

__all__ = ["PackedCase", "build_packed", "offsets_of", "packed_cases"]

#: A case, the number of queries of each of its entries, and of rows after the last entry.
PackedCase = tuple[CacheCase, tuple[int, ...], int]


def offsets_of(counts: tuple[int, ...]) -> Any:
    """Where the queries of entries begin, and where the last ones end."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def build_packed(case: CacheCase, counts: tuple[int, ...], behind: int = 0) -> Built:
    """The arrays of a problem; rows after the last entry are NaN.

    An entry has the same queries as in the problem without packing, and as many new tokens if
    there are any.
    """
    assert len(counts) == case.batch
    most = max(1, *counts)
    built = build(replace(case, queries=most, new=None if case.new is None else most))
    arrays = built.arrays | {"cu_seqlens_q": offsets_of(counts)}
    for name in {"q", "k", "v"} & {*arrays}:
        padded = arrays[name]
        rows = [padded[b, :count] for b, count in enumerate(counts)]
        rows.append(np.full((behind, *padded.shape[2:]), np.nan, padded.dtype))
        arrays[name] = np.concatenate(rows)
    return replace(built, arrays=arrays)


@st.composite
def packed_cases(draw: Any, **kinds: Any) -> PackedCase:
    """Small problems: entries without queries, with more than keys, and rows of no entry."""
    case = draw(cases(**kinds))
    longest = max(case.lengths)
    number = st.one_of(st.integers(0, 4), st.sampled_from([longest, longest + 1]))
    if case.new is None:
        counts = tuple(draw(number) for _ in case.lengths)
    elif case.counts:  # of tokens that do not fit
        counts = tuple(draw(st.integers(0, 4)) for _ in case.lengths)
    else:
        counts = tuple(draw(st.integers(0, case.new)) for _ in case.lengths)
    return case, counts, draw(st.integers(0, 3))

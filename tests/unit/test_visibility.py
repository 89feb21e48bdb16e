"""Formulas for the keys that a query sees, against the definition, pair by pair."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.planning.device import DeviceLimits
from cuflash.planning.plan import plan
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.visibility import Visibility

from ..architectures import LIMITS

_LENGTHS = st.integers(0, 14)
_BOUNDS = st.none() | st.integers(-17, 17)
_CASES = st.builds(Visibility, _LENGTHS, _LENGTHS, _BOUNDS, _BOUNDS)


def sees(of: Visibility, query: int, key: int) -> bool:
    """Whether a query sees a key, by the definition."""
    first = of.first is None or query + of.first <= key
    return first and (of.last is None or key <= query + of.last)


@given(_CASES)
def test_pairs_and_the_most_keys_of_a_query(of: Visibility) -> None:
    seen = [sum(sees(of, i, j) for j in range(of.seqlen_kv)) for i in range(of.seqlen_q)]
    assert (of.pairs, of.most_keys) == (sum(seen), max(seen, default=0))


@given(_CASES, st.data())
def test_ranges_hold_what_is_seen_and_no_more(of: Visibility, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, max(0, of.seqlen_q - 1)))
    end = data.draw(st.integers(begin, of.seqlen_q))
    keys = [j for j in range(of.seqlen_kv) if any(sees(of, i, j) for i in range(begin, end))]
    first, last = of.keys_seen(begin, end)
    if keys:
        assert (first, last) == (keys[0], keys[-1] + 1)
    begin = data.draw(st.integers(0, max(0, of.seqlen_kv - 1)))
    end = data.draw(st.integers(begin, of.seqlen_kv))
    queries = [i for i in range(of.seqlen_q) if any(sees(of, i, j) for j in range(begin, end))]
    first, last = of.queries_seeing(begin, end)
    if queries:
        assert (first, last) == (queries[0], queries[-1] + 1)


@pytest.mark.parametrize(
    ("sides", "blocks"),
    [((127, 0), (256, 64)), ((639, 640), (256, 64)), ((640, 640), (192, 128))],
)
def test_narrow_windows_of_narrow_heads_take_the_tall_tile(
    sides: tuple[int, int], blocks: tuple[int, int]
) -> None:
    left, right = sides
    sizes = (2, 32, 32, 8192, 8192, 64, 64)
    plain = AttentionProblem("forward", *sizes, "bfloat16", "bfloat16", "band", 0.125, right)
    asked = replace(plain, q_first=-left, alignment="tensor_map")
    limits = LIMITS["90"]
    assert isinstance(limits, DeviceLimits)
    tile = plan(asked, limits, algorithm="fa3").tile
    assert (tile.block_q, tile.block_kv) == blocks

"""Plans of FlashAttention-3's backward pass: tiles that depend on lengths and numbers of heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.features.table import with_features
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles.fa3 import Fa3BackwardTile
from cuflash.planning.tiles.fa3_few import Fa3FewTile

from .test_plan_fa3 import HOPPER, planned
from .test_plan_fa3_backward import of_gradients


def _problem(width: int, queries: int, keys: int, **changes: Any) -> AttentionProblem:
    plain = of_gradients(width=width, mask="full", seqlen_q=queries, seqlen_kv=keys)
    return replace(plain, **{"batch": 16, "heads_q": 8, "heads_kv": 8, **changes})


def _keeps_queries(problem: AttentionProblem) -> bool:
    return isinstance(planned(problem).tile, Fa3FewTile)


@given(
    queries=st.integers(1, 300),
    keys=st.integers(1, 5000),
    heads=st.integers(1, 300),
    width=st.sampled_from((40, 64, 72, 128, 136)),
    deterministic=st.booleans(),
)
def test_few_queries_on_more_than_a_tile_of_keys_are_kept(
    queries: int, keys: int, heads: int, width: int, deterministic: bool
) -> None:
    """Heads of more than 64 also need more tiles of keys than there are multiprocessors."""
    sizes = {"batch": 1, "heads_q": heads, "heads_kv": heads}
    problem = _problem(width, queries, keys, **sizes, deterministic=deterministic)
    enough = width <= 64 or heads * -(-keys // 128) > HOPPER.num_sms
    fits = queries <= 128 and width <= 128
    assert _keeps_queries(problem) == (fits and keys > 128 and enough and not deterministic)


def test_queries_of_shared_keys_and_of_features_are_not_kept() -> None:
    assert _keeps_queries(_problem(64, 77, 4096))
    assert not _keeps_queries(_problem(64, 77, 4096, heads_kv=4))
    assert not _keeps_queries(with_features(_problem(64, 77, 4096), {"softcap": 30.0}, {}))


def _converts_inside(problem: AttentionProblem) -> bool:
    tile = planned(problem).tile
    assert isinstance(tile, Fa3BackwardTile)
    return tile.kv_tiles_per_convert_block > 0


@pytest.mark.parametrize(
    ("queries", "keys", "inside"),
    [
        (1111, 1111, True),
        (255, 256, False),
        (256, 255, False),
        (256, 256, True),
        (4096, 4096, True),
        (4096, 4097, False),
        (4097, 4096, False),
        (500, 1000, True),
        (500, 1001, False),
        (1000, 500, True),
        (1001, 500, False),
    ],
)
def test_sums_of_about_as_many_queries_as_keys_are_converted_inside(
    queries: int, keys: int, inside: bool
) -> None:
    """In heads of 33 to 64."""
    for width in (40, 64):
        assert _converts_inside(_problem(width, queries, keys)) == inside
    assert not _converts_inside(_problem(32, queries, keys))
    assert _converts_inside(_problem(72, queries, keys))


def test_sums_in_order_and_those_of_features_are_converted_afterwards() -> None:
    plain = _problem(64, 1000, 1000)
    assert _converts_inside(replace(plain, heads_kv=2))
    assert not _converts_inside(replace(plain, deterministic=True))
    assert not _converts_inside(with_features(plain, {"softcap": 30.0}, {}))

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
from cuflash.planning.tiles.fa3_short import Fa3ShortTile

from .test_plan_fa3 import HOPPER, planned
from .test_plan_fa3_backward import of_gradients


def _problem(width: int, queries: int, keys: int, **changes: Any) -> AttentionProblem:
    plain = of_gradients(width=width, mask="full", seqlen_q=queries, seqlen_kv=keys)
    return replace(plain, **{"batch": 16, "heads_q": 8, "heads_kv": 8, **changes})


def _kept(problem: AttentionProblem) -> str:
    """Whether the plan keeps keys, few queries or those of short heads."""
    kinds = {Fa3BackwardTile: "keys", Fa3FewTile: "few", Fa3ShortTile: "short"}
    return kinds[type(planned(problem).tile)]


_SMS = 132
#: The most heads that a multiprocessor takes, and the fewest over all that leave few of them idle.
_FULL = {1: 116, 2: 231, 3: 347}


@given(
    queries=st.one_of(st.sampled_from((64, 65, 128, 129, 256, 257)), st.integers(1, 300)),
    keys=st.one_of(st.sampled_from((128, 129)), st.integers(1, 5000)),
    heads=st.one_of(st.integers(110, 140), st.integers(1, 396)),
    width=st.sampled_from((32, 40, 64, 72, 128, 136)),
    deterministic=st.booleans(),
)
def test_few_queries_are_kept_where_that_was_faster(
    queries: int, keys: int, heads: int, width: int, deterministic: bool
) -> None:
    sizes = {"batch": 1, "heads_q": heads, "heads_kv": heads}
    problem = _problem(width, queries, keys, **sizes, deterministic=deterministic)
    one_tile = keys <= 128
    few = queries <= 128 and width <= 128 and not one_tile and not deterministic
    few = few and (width <= 64 or heads * -(-keys // 128) > _SMS)
    short = queries <= 256 and width <= 64
    full = heads >= _FULL[-(-heads // _SMS)]
    between = 64 < queries <= 128 and not deterministic
    short = short and (one_tile or (full and not between))
    assert _kept(problem) == ("short" if short else "few" if few else "keys")
    assert HOPPER.num_sms == _SMS


@pytest.mark.parametrize(("queries", "kept"), [(77, "few"), (200, "short")])
def test_queries_of_shared_keys_and_of_features_are_not_kept(queries: int, kept: str) -> None:
    plain = _problem(64, queries, 4096)
    assert _kept(plain) == kept
    assert _kept(replace(plain, heads_kv=4)) == "keys"
    assert _kept(with_features(plain, {"softcap": 30.0}, {})) == "keys"


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
    """This holds for head_dim 33 to 64. Query heads share keys, which rules other tiles out."""
    for width in (40, 64):
        assert _converts_inside(_problem(width, queries, keys, heads_kv=2)) == inside
    assert not _converts_inside(_problem(32, queries, keys, heads_kv=2))
    assert _converts_inside(_problem(72, queries, keys, heads_kv=2))


def test_sums_in_order_and_those_of_features_are_converted_afterwards() -> None:
    plain = _problem(64, 1000, 1000)
    assert _converts_inside(replace(plain, heads_kv=2))
    assert not _converts_inside(replace(plain, deterministic=True))
    assert not _converts_inside(with_features(plain, {"softcap": 30.0}, {}))

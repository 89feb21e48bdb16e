"""The plan of FlashAttention-3's backward pass by the tile for few queries."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.errors import UnsupportedError
from cuflash.features.table import with_features
from cuflash.planning.fa3 import fa3_plan
from cuflash.planning.fa3_few import kv_splits_of
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles.fa3 import Fa3BackwardTile
from cuflash.planning.tiles.fa3_few import Fa3FewTile, few_tiles, why_not_few

from ..kit.few import few_alone
from .test_plan_fa3 import HOPPER, planned
from .test_plan_fa3_backward import of_gradients


def _problem(**changes: Any) -> AttentionProblem:
    plain = of_gradients(width=128, mask="full", seqlen_q=77, seqlen_kv=4096)
    return replace(plain, **{"batch": 16, "heads_q": 8, "heads_kv": 8, **changes})


def test_a_plan_has_three_kernels_and_a_block_for_each_head() -> None:
    with few_alone():
        chosen = planned(_problem())
    before, main, after = chosen.launches
    names = [launch.config.entry for launch in chosen.launches]
    assert names == [
        "cuflash_steps_statistics",
        "cuflash_fa3_backward_few",
        "cuflash_steps_convert_dq",
    ]
    assert main.grid == before.grid == after.grid == 128
    assert dict(before.arguments) == {"padded_rows": 128, "cleared": 128}
    assert dict(main.arguments) == {"padded_rows": 128, "kv_splits": 1}
    assert dict(main.boxes) == dict.fromkeys(("q", "k", "v", "dout"), 128)
    assert {launch.config.architecture for launch in chosen.launches} == {"sm_90a"}
    sizes = {buffer.name: buffer.nbytes for buffer in chosen.workspace}
    rows = 128 * 128 * 4
    assert sizes == {"row_lse": rows, "delta": rows, "dq_accumulator": 128 * rows}


@pytest.mark.parametrize(
    ("widths", "tile"), {(1, 64): (64, 64), (64, 65): (128, 128), (128, 8): (128, 128)}.items()
)
def test_the_narrowest_tile_is_taken(widths: tuple[int, int], tile: tuple[int, int]) -> None:
    (found,) = few_tiles(_problem(head_dim=widths[0], head_dim_v=widths[1]))
    assert (found.head_dim, found.head_dim_v) == tile
    assert found.footprint.excess(HOPPER) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    {
        "seqlen_q": (129, "takes up to 128 queries, not 129"),
        "heads_kv": (4, "takes a head of keys for each query head, not for 2"),
    }.items(),
    ids=str,
)
def test_others_have_none(change: str, reason: tuple[int, str]) -> None:
    problem = _problem(**{change: reason[0]})
    assert why_not_few(problem) == reason[1]
    (tile,) = few_tiles(_problem())
    with pytest.raises(UnsupportedError, match=f"few queries {reason[1]}"):
        fa3_plan(problem, HOPPER, None, (), tile=tile)
    with few_alone(), pytest.raises(UnsupportedError, match="no tile"):
        planned(problem)


def test_wide_heads_and_features_have_none() -> None:
    assert not [*few_tiles(_problem(head_dim=136))]
    assert not [*few_tiles(_problem(head_dim_v=136))]
    capped = with_features(_problem(), {"softcap": 30.0}, {})
    assert why_not_few(capped) == "takes no softcap"
    assert not [*few_tiles(capped)]


def test_blocks_name_the_tile_that_keeps_keys_where_it_has_the_same() -> None:
    narrow = _problem(head_dim=64, head_dim_v=64)
    assert isinstance(planned(narrow).tile, Fa3FewTile)
    assert isinstance(planned(narrow, blocks=(128, 128)).tile, Fa3BackwardTile)


@pytest.mark.parametrize("blocks", [(64, 128), (128, 128)])
def test_either_tile_can_be_asked_for(blocks: tuple[int, int]) -> None:
    for keys in (128, 4096):
        tile = planned(_problem(seqlen_kv=keys), blocks=blocks).tile
        assert isinstance(tile, Fa3FewTile) == (blocks == (128, 128))


@given(batch=st.integers(1, 40), heads=st.integers(1, 40), keys=st.integers(1, 100_000))
def test_splits_take_the_fewest_steps(batch: int, heads: int, keys: int) -> None:
    """Every block also has at least one kv tile."""
    problem = _problem(batch=batch, heads_q=heads, heads_kv=heads, seqlen_kv=keys)
    (tile,) = few_tiles(problem)
    splits, tiles, sms = kv_splits_of(problem, HOPPER, tile), ceil(keys / 128), HOPPER.num_sms
    assert 1 <= splits <= tiles
    assert kv_splits_of(replace(problem, deterministic=True), HOPPER, tile) == 1

    def steps(splits: int) -> int:
        return ceil(batch * heads * splits / sms) * (ceil(tiles / splits) + 2)

    assert steps(splits) <= min(map(steps, range(1, min(tiles, sms) + 1))) or (
        batch * heads >= 4 * sms and splits == 1
    )


def test_few_heads_share_their_kv_tiles() -> None:
    with few_alone():
        chosen = planned(_problem(batch=1, heads_q=2, heads_kv=2, seqlen_kv=100_000))
    main = chosen.launches[1]
    assert dict(main.arguments)["kv_splits"] == 66
    assert main.grid == 132
    assert chosen.reason.endswith("66 blocks share the kv tiles of a head, as heads are few")

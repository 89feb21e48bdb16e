"""The plan of FlashAttention-3's backward pass by the tile for short heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cuflash.errors import UnsupportedError
from cuflash.features.table import with_features
from cuflash.planning.fa3 import fa3_plan
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles import fa3
from cuflash.planning.tiles.fa3_short import Fa3ShortTile, short_tiles, why_not_short

from ..kit.few import short_alone
from .test_plan_fa3 import HOPPER, planned
from .test_plan_fa3_backward import of_gradients


def _problem(**changes: Any) -> AttentionProblem:
    plain = of_gradients(width=64, mask="full", seqlen_q=197, seqlen_kv=197)
    return replace(plain, **{"batch": 64, "heads_q": 12, "heads_kv": 12, **changes})


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_plan_has_two_kernels_and_no_sums_of_dq(deterministic: bool) -> None:
    with short_alone():
        chosen = planned(_problem(deterministic=deterministic))
    before, main = chosen.launches
    assert before.config.entry == "cuflash_steps_statistics"
    assert main.config.entry == "cuflash_fa3_backward_short"
    assert before.grid == 2 * 64 * 12
    assert main.grid == HOPPER.num_sms
    assert dict(before.arguments) == {"padded_rows": 256, "cleared": 0}
    assert dict(main.arguments) == {"padded_rows": 256}
    assert dict(main.boxes) == {"q": 64, "k": 128, "v": 128, "dout": 64}
    assert {launch.config.architecture for launch in chosen.launches} == {"sm_90a"}
    sizes = {buffer.name: buffer.nbytes for buffer in chosen.workspace}
    rows = 64 * 12 * 256 * 4
    assert sizes == {"row_lse": rows, "delta": rows}


def test_few_heads_have_a_block_each() -> None:
    with short_alone():
        chosen = planned(_problem(batch=2, heads_q=5, heads_kv=5))
    assert chosen.launches[1].grid == 10


@pytest.mark.parametrize(
    ("widths", "tile"), {(1, 32): (32, 32), (33, 8): (64, 64), (8, 64): (64, 64)}.items()
)
def test_the_narrowest_tile_is_taken(widths: tuple[int, int], tile: tuple[int, int]) -> None:
    (found,) = short_tiles(_problem(head_dim=widths[0], head_dim_v=widths[1]))
    assert (found.head_dim, found.head_dim_v) == tile
    assert (found.block_q, found.block_kv) == (256, 128)
    assert found.footprint.excess(HOPPER) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    {
        "seqlen_q": (257, "takes up to 256 queries, not 257"),
        "heads_kv": (6, "takes a head of keys for each query head, not for 2"),
    }.items(),
    ids=str,
)
def test_others_have_none(change: str, reason: tuple[int, str]) -> None:
    problem = _problem(**{change: reason[0]})
    assert why_not_short(problem) == reason[1]
    (tile,) = short_tiles(_problem())
    with pytest.raises(UnsupportedError, match=f"short heads {reason[1]}"):
        fa3_plan(problem, HOPPER, None, (), tile=tile)
    with short_alone(), pytest.raises(UnsupportedError, match="no tile"):
        planned(problem)


def test_wide_heads_and_features_have_none() -> None:
    assert not [*short_tiles(_problem(head_dim=72))]
    assert not [*short_tiles(_problem(head_dim_v=72))]
    capped = with_features(_problem(), {"softcap": 30.0}, {})
    assert why_not_short(capped) == "takes no softcap"
    assert not [*short_tiles(capped)]


def test_the_tile_can_be_asked_for() -> None:
    for batch in (1, 64):
        problem = _problem(batch=batch)
        tiles = [*fa3.candidates(problem, HOPPER, every=True)]
        (place,) = (i for i, tile in enumerate(tiles) if isinstance(tile, Fa3ShortTile))
        assert place == (0 if batch == 64 else len(tiles) - 1)
        blocks = [(tile.block_q, tile.block_kv) for tile in tiles]
        assert blocks.count(blocks[place]) == 1
        assert planned(problem, blocks=blocks[place]).tile == tiles[place]

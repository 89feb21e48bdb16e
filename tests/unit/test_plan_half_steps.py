"""When the last step of a kv tile of FlashAttention-3's gradients has half as many queries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cuflash.planning.tiles import fa3

from ..kit.parts import parts_forced
from .test_plan_fa3 import planned
from .test_plan_fa3_backward import main_of, of_gradients

#: Gradients of FlashAttention-3 take only the tiles that fit all lengths.
pytestmark = pytest.mark.usefixtures("any_lengths")


def _has_half_step(seqlen: int, **more: Any) -> bool:
    sizes = {"batch": 16, "heads_q": 20, "heads_kv": 20, "head_dim": 64, "head_dim_v": 64}
    problem = of_gradients(**({"mask": "full", "seqlen_q": seqlen, "seqlen_kv": 1500} | sizes))
    chosen = planned(replace(problem, **more))
    assert isinstance(chosen.tile, fa3.Fa3BackwardTile)
    constants = dict(main_of(chosen).config.constants)
    assert constants["half_last"] == chosen.tile.half_last
    return chosen.tile.half_last


@pytest.mark.parametrize(
    ("seqlen", "expected"),
    [
        *((n, True) for n in (129, 192, 257, 320, 448, 1025, 1088)),
        *((n, False) for n in (1, 64, 65, 128, 193, 256, 449, 512, 1089, 1153, 2049, 8193)),
    ],
)
def test_of_few_q_tiles_the_last_is_not_more_than_half_full(seqlen: int, expected: bool) -> None:
    assert _has_half_step(seqlen) == expected
    assert _has_half_step(seqlen, mask="causal") == expected


@pytest.mark.parametrize(
    "more",
    [
        {"deterministic": True},
        {"head_dim": 32, "head_dim_v": 32},
        {"head_dim": 128, "head_dim_v": 128},
        {"mask": "band", "q_first": -100},
    ],
    ids=str,
)
def test_in_the_plain_tile_alone(more: dict[str, Any]) -> None:
    assert _has_half_step(448)
    assert not _has_half_step(448, **more)


def test_not_where_blocks_share_a_tile() -> None:
    with parts_forced(2, cut=True):
        assert not _has_half_step(448)

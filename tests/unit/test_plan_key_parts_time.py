"""The predicted time of FlashAttention-3's gradients in parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from cuflash.planning import parts_choice
from cuflash.planning.key_parts import Parts
from cuflash.planning.parts_choice import parts_of
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles.fa3 import Fa3BackwardTile

from .test_plan_fa3 import planned
from .test_plan_fa3_backward import of_gradients

#: Gradients of FlashAttention-3 take only the tiles that fit all lengths.
pytestmark = pytest.mark.usefixtures("any_lengths")


def _grouped(batch: int, heads_q: int, heads_kv: int, **more: Any) -> AttentionProblem:
    return of_gradients(**{"batch": batch, "heads_q": heads_q, "heads_kv": heads_kv, **more})


def _parts(problem: AttentionProblem) -> Parts:
    tile = planned(problem).tile
    assert isinstance(tile, Fa3BackwardTile)
    return parts_of(problem, tile, 132)


def test_a_tile_has_32_parts_at_most() -> None:
    problem = _grouped(1, 1, 1, seqlen_q=100_000, seqlen_kv=100, head_dim=128, head_dim_v=128)
    assert _parts(problem) == Parts(32, cut=True)


def test_parts_of_many_tiles_are_not_considered() -> None:
    """A plan of many keys takes no time that grows with them."""
    with mock.patch.object(parts_choice, "_lengths", side_effect=AssertionError("counted")):
        assert _parts(_grouped(1, 1, 1, seqlen=2**24, width=128, mask="causal")) == Parts(1)


@pytest.mark.parametrize(("d", "dv"), [(64, 64), (192, 128), (192, 192), (192, 256)])
@pytest.mark.parametrize(
    "parts", [Parts(1), Parts(4), Parts(3, cut=True), Parts(3, True, 5), Parts(40, True, 7)]
)
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_the_predicted_time_has_these_terms(mask: str, parts: Parts, d: int, dv: int) -> None:
    """Steps, blocks, the bytes of partial tiles, and those of the sums of dQ."""
    problem = _grouped(
        3, 8, 2, seqlen_q=1500, seqlen_kv=900, head_dim=d, head_dim_v=dv, mask=mask, q_offset=0
    )
    tile = planned(replace(problem, deterministic=True)).tile
    assert isinstance(tile, Fa3BackwardTile)
    d, dv = tile.head_dim, tile.head_dim_v
    rows, keys = tile.block_q, tile.block_kv
    tiles, q_tiles = -(-900 // keys), -(-1500 // rows)
    seen = [q_tiles - (keys * i // rows if mask == "causal" else 0) for i in range(tiles)]
    block = -(-max(seen) * 4 // parts.number) + 1.5
    blocks = (parts.last or 3 * 2 * tiles) * parts.number
    if parts.last and mask == "causal":
        return  # such tiles take unequal time, and only equal ones are cut in this way
    if mask == "full":
        steps = -(-blocks // 132) * block
        steps += (parts.last > 0) * (q_tiles * 4 + 1.5)  # whole tiles, fewer than 132
    else:
        share = (3 * 8 * sum(seen) + 1.5 * blocks) / 132
        steps = max(block, share + (0.3 if keys < 128 else 0.15) * block)
    step = 2.1 * rows * keys * (3 * d + 2 * dv) / (64 * 128 * 640)
    expected = 10 + (0.85 if keys == 96 else 1) * step * steps
    if parts.number > 1:
        expected += 3 + 8 * blocks * keys * (d + dv) / 3.1e6
    if parts.cut and not parts.last:
        expected += 10 * 3 * 8 * 1500 * d / 4e6
    of_tiles = parts_choice._StepsOfTiles.of(parts_choice._lengths(problem, tile))
    assert parts_choice._time(parts, problem, tile, of_tiles, 132) == pytest.approx(expected)


def test_half_steps_of_whole_tiles_take_half_the_time() -> None:
    """Two query heads share keys, so a tile has two half steps; parts have none."""
    sizes = {"seqlen_kv": 1500, "head_dim": 64, "head_dim_v": 64, "mask": "full"}
    full, half = (_grouped(4, 8, 4, seqlen_q=n, **sizes) for n in (512, 448))
    tile = planned(half).tile
    assert isinstance(tile, Fa3BackwardTile)

    def time(problem: AttentionProblem, parts: Parts) -> float:
        of_tiles = parts_choice._StepsOfTiles.of(parts_choice._lengths(problem, tile))
        return parts_choice._time(parts, problem, tile, of_tiles, 132)

    assert tile.half_last
    rounds, step = 2, 2.1 * 128 * 128 * 64 * 5 / (64 * 128 * 640)
    saved = time(full, Parts(1)) - time(half, Parts(1))
    assert saved == pytest.approx(rounds * step * 2 / 2)
    assert time(full, Parts(2, True, 5)) == time(half, Parts(2, True, 5))
    causal = [replace(x, mask="causal", q_offset=0) for x in (full, half)]
    assert time(causal[0], Parts(1)) > time(causal[1], Parts(1))

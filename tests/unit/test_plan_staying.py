"""Which blocks of FlashAttention-3's backward pass go through several kv tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cuflash.planning.tiles import fa3

from .test_plan_fa3 import HOPPER, planned
from .test_plan_fa3_backward import main_of, of_gradients

#: No group of heads is divided into parts, however few tiles there are.
pytestmark = pytest.mark.usefixtures("whole_groups")

#: Changes of a problem of 512 queries and keys; its blocks stay, but not with any of these changes.
_LEAVE: dict[str, dict[str, Any]] = {
    "more steps": {"seqlen_q": 513},
    "a group of heads": {"heads_kv": 2},
    "ordered sums": {"deterministic": True},
    "a wider head": {"head_dim": 40},
}


@pytest.mark.parametrize("change", [None, *_LEAVE])
def test_blocks_stay_where_kv_tiles_have_few_steps(change: str | None) -> None:
    plain = of_gradients(head_dim=32, head_dim_v=32, mask="full", seqlen=512)
    plain = replace(plain, batch=64, heads_q=4, heads_kv=4)
    problem = replace(plain, **_LEAVE.get(change or "", {}))
    chosen = planned(problem)
    main, tiles = main_of(chosen), problem.batch * problem.heads_kv * 4
    assert isinstance(chosen.tile, fa3.Fa3BackwardTile)
    assert chosen.tile.stays == (change is None)
    assert dict(main.config.constants)["stays"] == (change is None)
    assert main.grid == (HOPPER.num_sms if change is None else tiles)
    before = dict(chosen.launches[0].arguments)
    every = problem.batch * problem.heads_q
    ahead = dict(main.arguments)["ahead"]
    assert (ahead == tiles) == (change is None), "no block clears, or waits"
    assert (before["cleared"] == every) == (change is None)


def test_fewer_tiles_than_multiprocessors_have_a_block_each() -> None:
    problem = of_gradients(head_dim=32, head_dim_v=32, mask="causal", seqlen=300)
    problem = replace(problem, batch=2, heads_q=3, heads_kv=3)
    assert main_of(planned(problem)).grid == 18

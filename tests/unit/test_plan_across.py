"""Plans of FlashAttention-3's gradients whose scores are queries x keys: 96 keys of wide heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cuflash.calls_to_come import Calls
from cuflash.compile_ahead import kernels_of
from cuflash.errors import ArgumentValueError
from cuflash.features.table import with_features
from cuflash.planning.plan import plan
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles import fa3

from ..architectures import LIMITS
from .test_plan_fa3 import HOPPER, mapped

_WIDE = mapped(operation="backward", head_dim=192, head_dim_v=192)


def _tile(problem: AttentionProblem, **more: Any) -> fa3.Fa3BackwardTile:
    tile = plan(problem, HOPPER, algorithm="fa3", **more).tile
    assert isinstance(tile, fa3.Fa3BackwardTile)
    return tile


@pytest.mark.parametrize("changes", [{}, {"deterministic": True}, {"mask": "causal"}], ids=str)
def test_plain_passes_take_96_keys(changes: dict[str, Any]) -> None:
    tile = _tile(replace(_WIDE, **changes))
    assert (tile.block_q, tile.block_kv) == (64, 96)
    assert tile.shares_keys
    assert tile.ordered == ("deterministic" in changes)


@pytest.mark.parametrize("features", [{"softcap": 9.0}, {"window": (100, 0)}], ids=str)
def test_features_take_64_keys(features: dict[str, Any]) -> None:
    problem = with_features(_WIDE, features, {})
    if "window" in features:
        problem = replace(_WIDE, mask="band", q_first=-100)
    assert problem != _WIDE
    assert _tile(problem).block_kv == 64


@pytest.mark.parametrize("widths", [(128, 192), (192, 128), (64, 136)], ids=str)
def test_where_one_width_is_narrow_callers_may_ask_for_96_keys(widths: tuple[int, int]) -> None:
    problem = replace(_WIDE, head_dim=widths[0], head_dim_v=widths[1])
    assert _tile(problem).block_kv != 96
    asked = _tile(problem, blocks=(64, 96))
    assert (asked.block_kv, asked.head_dim, asked.head_dim_v) == (96, 192, 192)


@pytest.mark.parametrize("width", [128, 200])
def test_96_keys_are_refused_where_there_is_no_kernel(width: int) -> None:
    with pytest.raises(ArgumentValueError, match=r"\(64, 96\)"):
        _tile(replace(_WIDE, head_dim=width, head_dim_v=width), blocks=(64, 96))
    with pytest.raises(ArgumentValueError, match=r"expected one of \(64, 64\)"):
        _tile(with_features(_WIDE, {"softcap": 9.0}, {}), blocks=(64, 96))


def test_a_warpgroup_has_keys_of_its_own_in_tiles_of_128() -> None:
    narrow = replace(_WIDE, head_dim_v=128)
    assert not _tile(narrow).shares_keys
    assert _tile(narrow, blocks=(64, 64)).shares_keys


@pytest.mark.parametrize("softcap", [False, True])
def test_kernels_that_are_compiled_ahead(softcap: bool) -> None:
    """One for each tile, mask and way in which blocks share a kv tile."""
    calls = Calls(((192, 192),), ("bfloat16",), ("backward",), softcap=(softcap,))
    made = [x for x in kernels_of(calls, LIMITS["90"]) if x.generation == "fa3"]
    main = [dict(x.constants) for x in made if x.kernel == "backward"]
    assert {one["block_kv"] for one in main} == ({64} if softcap else {64, 96})
    kinds = {(one["parted"], one["cut"], one["cut_last"]) for one in main}
    cut = {(1, 1, 0), (1, 1, 1)}
    assert kinds == {(0, 0, 0), (1, 0, 0)} | (set() if softcap else cut)


@pytest.mark.parametrize(
    ("keys", "block_kv"), [(64, 96), (96, 96), (97, 64), (128, 64), (129, 96), (256, 96)]
)
def test_two_tiles_of_64_keys_are_faster_than_two_of_96(keys: int, block_kv: int) -> None:
    assert _tile(replace(_WIDE, seqlen_kv=keys)).block_kv == block_kv

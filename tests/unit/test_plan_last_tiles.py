"""Plans in which several blocks share each of the last kv tiles of FlashAttention-3's gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import cuflash
from cuflash.errors import UnsupportedError
from cuflash.planning.fa3 import fa3_plan
from cuflash.planning.key_parts import Parts
from cuflash.planning.parts_choice import kinds_of_parts, parts_of
from cuflash.planning.plan import Plan
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.row_order import RowOrder
from cuflash.planning.tiles.fa3 import Fa3BackwardTile

from ..kit.parts import parts_forced
from .fake_device import ADDRESS, FakeDevice, fake_device
from .test_plan_fa1 import check_workspace
from .test_plan_fa3 import HOPPER, planned
from .test_plan_fa3_backward import main_of, of_gradients

__all__ = ["fake_device"]

#: Gradients of FlashAttention-3 take only the tiles that fit all lengths.
pytestmark = pytest.mark.usefixtures("any_lengths")

_WIDTHS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))


def _problem(**more: Any) -> AttentionProblem:
    """6 kv heads of 8 or 16 kv tiles."""
    sizes = {"batch": 3, "heads_q": 24, "heads_kv": 2, "seqlen_q": 888, "seqlen_kv": 1000}
    return of_gradients(**({"mask": "full"} | sizes | more))


def _both(parts: int, last: int, **more: Any) -> tuple[Plan, Plan]:
    """The plan with whole tiles, and the plan that cuts the last ones."""
    problem = _problem(**more)
    with parts_forced(1):
        whole = planned(problem)
    with parts_forced(parts, cut=True, last=last):
        return whole, planned(problem)


@pytest.mark.parametrize(("d", "dv"), _WIDTHS)
@pytest.mark.parametrize(("parts", "last"), [(2, 1), (5, 7), (3, 40)])
def test_the_other_tiles_are_as_they_were(parts: int, last: int, d: int, dv: int) -> None:
    """Blocks clear and convert as without parts; only parts and their sum are added."""
    whole, cut = _both(parts, last, head_dim=d, head_dim_v=dv)
    assert cut.tile == whole.tile
    tile = cut.tile
    assert isinstance(tile, Fa3BackwardTile)
    one, main, added = main_of(whole), main_of(cut), cut.launches[-1]
    tiles = 3 * 2 * -(-1000 // tile.block_kv)
    both = {"parts": parts, "padded_keys": tile.block_kv, "whole_tiles": tiles - last}
    assert dict(main.arguments).items() >= both.items()
    more = dict(main.arguments).keys() - both.keys()
    assert more == dict(one.arguments).keys(), "heads are counted as they are"
    for name in more - {"convert_lag"}:
        assert dict(main.arguments)[name] == dict(one.arguments)[name]
    order = RowOrder(
        *(6, tiles // 6, 1, tile.kv_tiles_per_convert_block, 132), shared=Parts(parts, True, last)
    )
    assert main.grid == order.blocks > one.grid
    constants = dict(one.config.constants) | {"parted": 1, "cut": 1, "cut_last": 1}
    assert dict(main.config.constants) == constants
    assert [launch for launch in cut.launches if launch not in (main, added)] == [
        launch for launch in whole.launches if launch != one
    ]
    assert dict(added.arguments) == both
    places = last * tile.block_kv // 16 * ((tile.head_dim + tile.head_dim_v) // 32)
    assert added.grid == -(-places // 8)
    assert dict(added.config.constants)["cut_last"] == 1


@pytest.mark.parametrize(("d", "dv"), _WIDTHS)
def test_the_workspace_has_the_parts_of_the_last_tiles(d: int, dv: int) -> None:
    whole, cut = _both(5, 7, head_dim=d, head_dim_v=dv)
    assert cut.workspace[:-2] == whole.workspace
    tile = cut.tile
    assert isinstance(tile, Fa3BackwardTile)
    sizes = {b.name: b.nbytes for b in cut.workspace[-2:]}
    rows = 7 * 5 * tile.block_kv
    assert sizes == {"dk_parts": 4 * rows * d, "dv_parts": 4 * rows * dv}
    check_workspace(cut)
    assert cut.reason == whole.reason + (
        "; 5 blocks share the steps of each of the last 7 kv tiles, "
        "which would leave multiprocessors idle"
    )


def test_only_equal_tiles_without_features_or_an_order_are_cut() -> None:
    plain: dict[str, Any] = {
        "mask": "full",
        "seqlen_q": 8192,
        "seqlen_kv": 8192,
        "head_dim": 128,
        "head_dim_v": 128,
    }
    plain |= {"batch": 1, "heads_q": 9, "heads_kv": 9}

    def last(**more: Any) -> int:
        problem = of_gradients(**(plain | more))
        tile = planned(problem).tile
        assert isinstance(tile, Fa3BackwardTile)
        assert any(kind.last for kind in kinds_of_parts(problem)) == (not more)
        return parts_of(problem, tile, 132).last

    assert last() == 48
    assert last(deterministic=True) == 0
    # Without a mask in effect, but with the kernel of one.
    assert last(mask="causal", q_offset=8192) == 0


def test_no_block_of_a_cut_tile_may_have_sums_to_clear() -> None:
    """Every part of the tile would clear them. With 3 multiprocessors blocks clear far ahead."""
    problem = _problem(head_dim=128, head_dim_v=128, seqlen_kv=100, heads_kv=4)
    few = replace(HOPPER, num_sms=3)
    for last, taken in ((3, True), (9, False)):
        if taken:
            assert fa3_plan(problem, few, None, (), parts=Parts(2, True, last))
        else:
            with pytest.raises(UnsupportedError, match="cuts the last 4 kv tiles here, not 9"):
                fa3_plan(problem, few, None, (), parts=Parts(2, True, last))


def test_the_main_kernel_and_the_sum_are_told_where_cuts_begin(fake_device: FakeDevice) -> None:
    of_q, of_keys = (2, 300, 8, 64), (2, 200, 2, 64)
    with parts_forced(3, cut=True, last=5):
        prepared = cuflash.prepare(of_q, of_keys, of_keys, dtype="float16", operation="backward")
    pointers = {name: ADDRESS * (i + 1) for i, name in enumerate(prepared.tensors)}
    prepared.run(pointers, workspace=ADDRESS * 99)
    every = fake_device.launched
    parts = {buffer.name: ADDRESS * 99 + buffer.offset for buffer in prepared.plan.workspace}
    for launched in (every[1], every[-1]):
        told = {name: int(launched[name]) for name in ("parts", "padded_keys", "whole_tiles")}
        assert told == {"parts": 3, "padded_keys": 128, "whole_tiles": 3}
        for name in ("dk_parts", "dv_parts"):
            assert int(launched[name]) == parts[name]
    assert {int(x["shape"]["heads_kv"]) for x in every} == {2}

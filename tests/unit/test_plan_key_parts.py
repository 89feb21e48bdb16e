"""Plans in which several blocks share a kv tile of FlashAttention-3's gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import cuflash
from cuflash.planning.head_groups import head_group_of
from cuflash.planning.plan import Plan
from cuflash.planning.problem import AttentionProblem

from ..kit.parts import parts_forced
from .fake_device import ADDRESS, FakeDevice, fake_device
from .test_plan_fa1 import check_workspace
from .test_plan_fa3 import HOPPER, planned
from .test_plan_fa3_backward import main_of, of_gradients

__all__ = ["fake_device"]

#: Gradients of FlashAttention-3 take only the tiles that fit all lengths.
pytestmark = pytest.mark.usefixtures("any_lengths")


def _grouped(batch: int, heads_q: int, heads_kv: int, **more: Any) -> AttentionProblem:
    return of_gradients(**{"batch": batch, "heads_q": heads_q, "heads_kv": heads_kv, **more})


def _both(parts: int, **more: Any) -> tuple[Plan, Plan]:
    """The plan with whole groups, and the plan with this number of parts."""
    problem = _grouped(3, 24, 2, **{"seqlen_q": 888, "seqlen_kv": 1000, **more})
    with parts_forced(1):
        whole = planned(problem)
    with parts_forced(parts):
        return whole, planned(problem)


_WIDTHS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("d", "dv"), _WIDTHS)
@pytest.mark.parametrize("parts", [2, 3, 12])
def test_the_main_kernel_takes_a_part_for_a_head(
    parts: int, d: int, dv: int, deterministic: bool
) -> None:
    """The kernel's parameters are those of a problem with as many kv heads as parts."""
    widths = {"head_dim": d, "head_dim_v": dv, "deterministic": deterministic}
    whole, parted = _both(parts, **widths)
    with parts_forced(1):
        of_heads = planned(replace(parted.problem, heads_kv=2 * parts))
    one, other, main = main_of(whole), main_of(of_heads), main_of(parted)
    assert main.grid == other.grid
    keys = -(-1000 // parted.tile.block_kv) * parted.tile.block_kv
    more = {"heads_kv": 2 * parts, "parts": parts, "padded_keys": keys}
    assert dict(main.arguments) == dict(other.arguments) | more
    assert (main.boxes, parted.launches[0]) == (other.boxes, of_heads.launches[0])
    assert parted.launches[2:-1] == whole.launches[2:] == of_heads.launches[2:]
    constants = dict(main.config.constants)
    assert constants == dict(one.config.constants) | {"parted": 1, "cut": 0, "cut_last": 0}
    assert replace(main.config, constants=one.config.constants) == one.config
    assert dict(one.config.constants)["parted"] == 0
    assert not {"parts", "heads_kv"} & dict(one.arguments).keys()


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize(("d", "dv"), _WIDTHS)
@pytest.mark.parametrize("parts", [2, 5])
def test_of_cut_steps_another_kernel_clears_and_converts_all_rows(
    parts: int, d: int, dv: int, mask: str
) -> None:
    """No block has all rows of a head; all parts of a tile run together."""
    problem = _grouped(3, 24, 2, seqlen_q=888, seqlen_kv=1000, head_dim=d, head_dim_v=dv, mask=mask)
    with parts_forced(parts, cut=True):
        cut = planned(problem)
    with parts_forced(1):
        tile = planned(problem).tile
    assert cut.tile == replace(tile, kv_tiles_per_convert_block=0)
    before, main, after, added = cut.launches
    kernels = [one.config.kernel for one in (before, main, after, added)]
    assert kernels == ["statistics", "backward", "convert_dq", "sum_parts"]
    tiles = 3 * 2 * -(-1000 // tile.block_kv)
    arguments = dict(main.arguments)
    assert dict(before.arguments)["cleared"] == 3 * 24
    assert main.grid == arguments["ahead"] == parts * tiles
    assert (arguments["heads_kv"], arguments["parts"]) == (2 * parts, parts)
    # Without a mask heads come one at a time; under one their blocks fill two rounds.
    of_tile = -(-1000 // tile.block_kv) * parts
    heads = 1 if mask == "full" else head_group_of(problem, HOPPER, of_tile, 1, 8)
    assert arguments["head_group"] == parts * heads
    constants = dict(main.config.constants)
    assert (constants["parted"], constants["cut"], constants["stays"]) == (1, 1, 0)
    assert dict(added.arguments) == {"parts": parts, "padded_keys": arguments["padded_keys"]}
    assert cut.reason.endswith(
        f"; {parts} blocks share the steps of a kv tile, as kv tiles are few"
    )
    check_workspace(cut)


@pytest.mark.parametrize(("d", "dv"), _WIDTHS)
@pytest.mark.parametrize("parts", [2, 12])
def test_the_workspace_has_the_parts_behind_everything_else(parts: int, d: int, dv: int) -> None:
    whole, parted = _both(parts, head_dim=d, head_dim_v=dv)
    assert parted.workspace[:-2] == whole.workspace
    assert parted.reason == whole.reason + (
        f"; {parts} blocks share the query heads of a kv tile, as kv tiles are few"
    )
    keys = -(-1000 // parted.tile.block_kv) * parted.tile.block_kv
    sizes = {b.name: b.nbytes for b in parted.workspace[-2:]}
    rows = 3 * 2 * parts * keys
    assert sizes == {"dk_parts": 4 * rows * d, "dv_parts": 4 * rows * dv}
    check_workspace(parted)
    assert parted.workspace_bytes > whole.workspace_bytes + sum(sizes.values()) - 1


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("d", "dv"), _WIDTHS)
def test_the_sum_has_a_warp_for_every_place(d: int, dv: int, deterministic: bool) -> None:
    _, parted = _both(3, head_dim=d, head_dim_v=dv, deterministic=deterministic)
    launch = parted.launches[-1]
    assert (launch.config.generation, launch.config.kernel) == ("fa3", "sum_parts")
    constants = dict(launch.config.constants)
    assert constants == {"warps": 8, "sum_rows": 16, "sum_columns": 32, "cut_last": 0}
    places = 3 * 2 * 63 * ((d + dv) // 32)  # 63 groups of 16 keys cover 1000 keys
    assert launch.grid == -(-places // 8)
    keys = -(-1000 // parted.tile.block_kv) * parted.tile.block_kv
    assert dict(launch.arguments) == {"parts": 3, "padded_keys": keys}
    assert (launch.config.head_dim, launch.config.head_dim_v) == (d, dv)
    assert (launch.config.threads, launch.config.shared_bytes) == (256, 8 * 16 * 128)
    # The kernel depends on widths, storage and architecture only.
    for more in ({"mask": "causal"}, {"output": "float32"}, {"seqlen_q": 5}):
        _, other = _both(3, **{"head_dim": d, "head_dim_v": dv, **more})
        assert other.launches[-1].config == launch.config


def test_heads_of_their_own_have_no_parts_in_a_fixed_order() -> None:
    for seqlen in (1, 1000, 100_000):
        problem = of_gradients(heads_q=4, heads_kv=4, seqlen=seqlen, deterministic=True)
        for launch in planned(problem).launches:
            assert not dict(launch.config.constants).get("parted")
            assert launch.config.kernel != "sum_parts"


@pytest.mark.parametrize(("number", "cut"), [(4, False), (3, True)])
def test_of_parts_the_main_kernel_is_told_of_more_heads_and_the_sum_is_not(
    fake_device: FakeDevice, number: int, cut: bool
) -> None:
    of_q, of_keys = (2, 300, 8, 64), (2, 200, 2, 64)
    with parts_forced(number, cut):
        prepared = cuflash.prepare(of_q, of_keys, of_keys, dtype="float16", operation="backward")
    pointers = {name: ADDRESS * (i + 1) for i, name in enumerate(prepared.tensors)}
    prepared.run(pointers, workspace=ADDRESS * 99)
    statistics, main, convert, added = fake_device.launched
    parts = {buffer.name: ADDRESS * 99 + buffer.offset for buffer in prepared.plan.workspace}
    assert dict(prepared.plan.launches[1].arguments)["parts"] == number
    for launched in (main, added):
        assert int(launched["parts"]) == number
        assert int(launched["padded_keys"]) == 256
        for name in ("dk_parts", "dv_parts"):
            assert int(launched[name]) == parts[name]
    heads = [int(x["shape"]["heads_kv"]) for x in (statistics, main, convert, added)]
    assert heads == [2, 2 * number, 2, 2]
    for name in ("dk", "dv"):
        assert int(added[name]["data"]) == pointers[name]
        assert int(added[name]["head_stride"]) == 64

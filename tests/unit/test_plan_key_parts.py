"""Plans in which several blocks share a kv tile of FlashAttention-3's gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash
from cuflash.features.table import with_features
from cuflash.planning.head_groups import head_group_of
from cuflash.planning.key_parts import Parts
from cuflash.planning.parts_choice import parts_of
from cuflash.planning.plan import Plan
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles.fa3 import Fa3BackwardTile

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


def _problem(heads: str, seqlen: int, head_dim: int, mask: str) -> AttentionProblem:
    """A problem; ``heads`` is a text "batch query heads/key heads"."""
    batch, heads_q, heads_kv = map(int, heads.replace("/", " ").split())
    lengths = {"seqlen_q": seqlen, "seqlen_kv": seqlen, "head_dim": head_dim}
    return _grouped(batch, heads_q, heads_kv, mask=mask, head_dim_v=head_dim, **lengths)


def _parts(problem: AttentionProblem) -> Parts:
    tile = planned(problem).tile
    assert isinstance(tile, Fa3BackwardTile)
    return parts_of(problem, tile, 132)


def _as_parts(parts: int | Parts) -> Parts:
    return parts if isinstance(parts, Parts) else Parts(parts)


def _cut(number: int) -> Parts:
    return Parts(number, cut=True)


# The times of these and other parts were measured, see "Steps in parts" in bench/NOTES.md. The
# times of the parts below are at most 4 % above the best.
@pytest.mark.parametrize(
    ("heads", "seqlen", "head_dim", "causal", "full"),
    [
        # Few tiles. The first problem has 128 for 132 multiprocessors: one nearly full round.
        ("2 32/1", 8192, 128, 8, 1),
        ("1 32/1", 8192, 128, 16, 2),
        ("2 32/1", 2048, 64, 8, 4),
        ("1 32/1", 2048, 256, 16, 4),
        ("2 16/1", 8192, 128, 8, 1),
        ("1 32/2", 2048, 128, 8, 4),
        ("1 8/1", 2048, 128, _cut(13), 8),
        # Few heads of their own, whose steps are cut.
        ("1 1/1", 16384, 128, _cut(2), 1),
        ("1 1/1", 8192, 128, _cut(4), _cut(2)),
        ("1 1/1", 8192, 64, _cut(4), _cut(2)),
        ("1 1/1", 4096, 128, _cut(6), _cut(4)),
        ("1 2/2", 8192, 128, _cut(2), 1),
        ("1 4/4", 8192, 128, 1, 1),
        ("1 6/6", 4096, 128, 1, Parts(2, True, 60)),
        ("1 1/1", 4096, 32, _cut(6), _cut(4)),
        # Enough tiles.
        ("2 32/8", 2048, 128, 1, 1),
        ("8 32/8", 512, 64, 1, 1),
        # The tiles that full rounds leave: 15.5 rounds and fewer.
        ("1 32/32", 8192, 128, 1, Parts(5, True, 68)),
        ("1 16/16", 16384, 128, 1, Parts(7, True, 68)),
        ("8 16/16", 2048, 128, 1, 1),
        ("1 16/16", 8192, 256, 1, Parts(5, True, 68)),
        ("1 16/16", 8192, 192, 1, Parts(5, True, 68)),
        ("1 9/9", 8192, 128, 1, Parts(5, True, 48)),
        ("1 5/5", 8192, 128, 1, Parts(2, True, 56)),
        ("1 9/9", 4096, 128, 1, Parts(5, True, 24)),
        ("1 5/5", 8192, 64, 1, Parts(2, True, 56)),
        ("1 10/10", 4096, 64, 1, Parts(2, True, 56)),
        ("1 20/20", 8192, 64, 1, 1),
        ("1 12/12", 8192, 64, 1, 1),
        ("1 11/11", 16384, 64, 1, 1),
        ("1 3/3", 4096, 256, 1, Parts(2, True, 60)),
        ("2 32/8", 8192, 128, 1, Parts(5, True, 100)),
        ("1 20/5", 8192, 128, 1, Parts(7, True, 56)),
        # After many rounds blocks end at any time: 31 rounds and four tiles.
        ("1 64/64", 8192, 64, 1, 1),
        ("1 64/64", 8192, 128, 1, 1),
        # No group that could have parts; the last problem has no work at all.
        ("8 8/8", 128, 64, 1, 1),
        ("0 8/1", 8192, 64, 1, 1),
    ],
)
def test_parts_where_blocks_are_few(
    heads: str, seqlen: int, head_dim: int, causal: int | Parts, full: int | Parts
) -> None:
    assert _parts(_problem(heads, seqlen, head_dim, "causal")) == _as_parts(causal)
    assert _parts(_problem(heads, seqlen, head_dim, "full")) == _as_parts(full)


@pytest.mark.parametrize("more", [{"deterministic": True}, {"softcap": 9.0}], ids=str)
def test_no_steps_are_cut_in_a_fixed_order_or_with_features(more: dict[str, Any]) -> None:
    few = _problem("1 1/1", 8192, 128, "causal")
    assert _parts(few).cut
    if "softcap" in more:
        assert _parts(with_features(few, more, {})) == Parts(1)
    else:
        assert _parts(replace(few, **more)) == Parts(1)


def test_a_group_has_divisors_only_without_cuts() -> None:
    """Seven query heads are one part or seven, where steps may not be cut."""
    for heads, seqlen, number in (("1 7/1", 2048, 7), ("1 6/2", 512, 3)):
        problem = replace(_problem(heads, seqlen, 128, "causal"), deterministic=True)
        assert _parts(problem) == Parts(number)


def test_tiles_that_no_query_sees_are_no_work() -> None:
    """The offset moves the causal mask, and so decides which tiles have work."""
    problem = _problem("1 32/1", 8192, 128, "causal")
    assert _parts(replace(problem, q_offset=-8192)) == Parts(1)
    assert _parts(replace(problem, q_offset=8192)) == _parts(replace(problem, mask="full"))
    # No query sees most tiles, and the other tiles have few steps.
    few, all_tiles = (replace(problem, q_offset=-7000), replace(problem, mask="full"))
    assert _parts(few).number > _parts(all_tiles).number


@given(
    st.integers(1, 8),
    st.integers(1, 40),
    st.integers(1, 8),
    st.integers(1, 9000),
    st.sampled_from(("full", "causal")),
)
def test_parts_divide_the_group_and_leave_full_rounds_alone(
    batch: int, group: int, heads: int, seqlen: int, mask: str
) -> None:
    problem = _problem(f"{batch} {group * heads}/{heads}", seqlen, 128, mask)
    parts = _parts(problem)
    assert parts.cut or group % parts.number == 0
    tiles = batch * heads * -(-seqlen // 128)
    assert parts.last in (0, tiles % 132)
    if mask == "causal" or tiles % 132 == 0 or tiles >= 132 * 16:
        assert parts.last == 0
    if tiles >= 132 * 16:
        assert parts == Parts(1)


def _both(parts: int, **more: Any) -> tuple[Plan, Plan]:
    """The plan with whole groups, and the plan with this number of parts."""
    problem = _grouped(3, 24, 2, **{"seqlen_q": 777, "seqlen_kv": 1000, **more})
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
    problem = _grouped(3, 24, 2, seqlen_q=777, seqlen_kv=1000, head_dim=d, head_dim_v=dv, mask=mask)
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


def test_the_workspace_is_linear_in_the_keys() -> None:
    """There are at most 32 parts, and one part if there are many tiles."""
    for mask in ("full", "causal"):
        for n in (128, 1024, 8192, 65536, 2**20):
            wanted = _grouped(1, 32, 1, width=128, mask=mask, seqlen_q=128, seqlen_kv=n)
            sizes = {b.name: b.nbytes for b in planned(wanted).workspace}
            parts = sizes.get("dk_parts", 0)
            assert parts <= 32 * n * 128 * 4
            assert n < 2**20 or parts == 0


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

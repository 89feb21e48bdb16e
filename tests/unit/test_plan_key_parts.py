"""When several blocks share a kv tile of FlashAttention-3's gradients, and what that takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash
from cuflash.planning.key_parts import parts_of
from cuflash.planning.plan import Plan
from cuflash.planning.problem import AttentionProblem

from ..kit.parts import parts_forced
from .fake_device import ADDRESS, FakeDevice, fake_device
from .test_plan_fa1 import check_workspace
from .test_plan_fa3 import HOPPER, planned
from .test_plan_fa3_backward import main_of, of_gradients

__all__ = ["fake_device"]

SMS = HOPPER.num_sms


def _grouped(batch: int, heads_q: int, heads_kv: int, **more: Any) -> AttentionProblem:
    return of_gradients(**{"batch": batch, "heads_q": heads_q, "heads_kv": heads_kv, **more})


def _parts(batch: int, heads: tuple[int, int], tiles: int, mask: str) -> int:
    return parts_of(_grouped(batch, *heads, mask=mask), tiles, 132)


@pytest.mark.parametrize(
    ("batch", "heads", "tiles", "causal", "full"),
    [
        # 128 tiles of 132 at once: without a mask a round that is nearly whole.
        (2, (32, 1), 64, 4, 1),
        (1, (32, 1), 64, 8, 2),
        (2, (16, 1), 64, 4, 1),
        (1, (32, 2), 64, 4, 1),
        (2, (32, 8), 16, 2, 1),
        # Three rounds are enough under a mask.
        (1, (8, 1), 396, 1, 1),
        (1, (8, 1), 395, 2, 1),
        # Whole rounds are, or many: 133 tiles would leave half of a second one.
        (1, (8, 1), 132, 4, 1),
        (1, (8, 1), 133, 4, 8),
        (1, (4, 1), 66, 4, 2),
        (1, (4, 1), 900, 1, 1),
        # As many as there are, where even those are too few.
        (1, (32, 1), 1, 32, 32),
        (1, (6, 2), 4, 3, 3),
        # A group has divisors only.
        (1, (6, 1), 100, 6, 6),
        (1, (7, 1), 120, 7, 1),
        (1, (7, 1), 100, 7, 7),
        # Nothing to part, and nothing to do.
        (1, (8, 8), 1, 1, 1),
        (1, (1, 1), 1, 1, 1),
        (0, (8, 1), 64, 1, 1),
    ],
)
def test_as_few_as_keep_the_multiprocessors_busy(
    batch: int, heads: tuple[int, int], tiles: int, causal: int, full: int
) -> None:
    assert _parts(batch, heads, tiles, "causal") == causal
    assert _parts(batch, heads, tiles, "full") == full


@given(
    st.integers(1, 8),
    st.integers(1, 40),
    st.integers(1, 8),
    st.integers(1, 600),
    st.sampled_from(("full", "causal")),
)
def test_parts_divide_the_group_and_no_fewer_would_do(
    batch: int, group: int, heads: int, tiles: int, mask: str
) -> None:
    parts = _parts(batch, (group * heads, heads), tiles, mask)
    assert group % parts == 0
    blocks = batch * heads * tiles

    def busy(count: int) -> float:
        if mask == "causal":
            return min(1.0, blocks * count / (3 * 132))
        return min(0.85, blocks * count / (-(-blocks * count // 132) * 132))

    divisors = [p for p in range(1, group + 1) if group % p == 0]
    assert all(busy(p) <= busy(parts) for p in divisors)
    assert all(busy(p) < busy(parts) for p in divisors if p < parts)


def _both(parts: int, **more: Any) -> tuple[Plan, Plan]:
    """The plan of whole groups, and that of parts."""
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
    """All that it is told is what it would be told of so many heads of keys."""
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
    assert constants == dict(one.config.constants) | {"parted": 1}
    assert replace(main.config, constants=one.config.constants) == one.config
    assert dict(one.config.constants)["parted"] == 0
    assert not {"parts", "heads_kv"} & dict(one.arguments).keys()


@pytest.mark.parametrize(("d", "dv"), _WIDTHS)
@pytest.mark.parametrize("parts", [2, 12])
def test_the_workspace_has_the_parts_behind_everything_else(parts: int, d: int, dv: int) -> None:
    whole, parted = _both(parts, head_dim=d, head_dim_v=dv)
    assert parted.workspace[:-2] == whole.workspace
    assert parted.reason == whole.reason + (
        f"; {parts} blocks share the query heads of a kv tile, which are few"
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
    assert constants == {"warps": 8, "sum_rows": 16, "sum_columns": 32}
    places = 3 * 2 * 63 * ((d + dv) // 32)  # 63 times 16 keys hold 1000
    assert launch.grid == -(-places // 8)
    keys = -(-1000 // parted.tile.block_kv) * parted.tile.block_kv
    assert dict(launch.arguments) == {"parts": 3, "padded_keys": keys}
    assert (launch.config.head_dim, launch.config.head_dim_v) == (d, dv)
    assert (launch.config.threads, launch.config.shared_bytes) == (256, 8 * 16 * 128)
    # Nothing but widths, storage and architecture makes another kernel of it.
    for more in ({"mask": "causal"}, {"output": "float32"}, {"seqlen_q": 5}):
        _, other = _both(3, **{"head_dim": d, "head_dim_v": dv, **more})
        assert other.launches[-1].config == launch.config


def test_the_workspace_is_linear_in_the_keys() -> None:
    """Parts are no more than query heads, and fewer the more tiles there are."""
    for mask in ("full", "causal"):
        for n in (128, 1024, 8192, 65536, 2**20):
            wanted = _grouped(1, 32, 1, width=128, mask=mask, seqlen_q=128, seqlen_kv=n)
            sizes = {b.name: b.nbytes for b in planned(wanted).workspace}
            parts = sizes.get("dk_parts", 0)
            assert parts <= 32 * n * 128 * 4
            assert parts <= 2 * 3 * SMS * 128 * 128 * 4


def test_heads_of_their_own_have_no_parts() -> None:
    for seqlen in (1, 1000, 100_000):
        for launch in planned(of_gradients(heads_q=4, heads_kv=4, seqlen=seqlen)).launches:
            assert not dict(launch.config.constants).get("parted")
            assert launch.config.kernel != "sum_parts"


def test_of_parts_the_main_kernel_is_told_of_more_heads_and_the_sum_is_not(
    fake_device: FakeDevice,
) -> None:
    of_q, of_keys = (2, 300, 8, 64), (2, 200, 2, 64)
    prepared = cuflash.prepare(of_q, of_keys, of_keys, dtype="float16", operation="backward")
    pointers = {name: ADDRESS * (i + 1) for i, name in enumerate(prepared.tensors)}
    prepared.run(pointers, workspace=ADDRESS * 99)
    statistics, main, convert, added = fake_device.launched
    parts = {buffer.name: ADDRESS * 99 + buffer.offset for buffer in prepared.plan.workspace}
    assert dict(prepared.plan.launches[1].arguments)["parts"] == 4
    for launched in (main, added):
        assert int(launched["parts"]) == 4
        assert int(launched["padded_keys"]) == 256
        for name in ("dk_parts", "dv_parts"):
            assert int(launched[name]) == parts[name]
    heads = [int(x["shape"]["heads_kv"]) for x in (statistics, main, convert, added)]
    assert heads == [2, 8, 2, 2]
    for name in ("dk", "dv"):
        assert int(added[name]["data"]) == pointers[name]
        assert int(added[name]["head_stride"]) == 64

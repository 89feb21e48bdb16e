"""FlashAttention-3's plans respect the limits of the multiprocessor and of the L2 cache."""

from __future__ import annotations

from itertools import product

import pytest

from cuflash.planning.head_groups import even_head_group
from cuflash.planning.tiles import fa3
from cuflash.planning.tiles.common import ceil_div
from cuflash.planning.tiles.fa3_tables import BUCKETS, FORWARD, FORWARD_OF_FEW, ForwardRow

from .test_plan_fa3 import HOPPER, mapped, planned

EVERY = (*FORWARD, *FORWARD_OF_FEW)
#: The limits of an H200, from the driver.
SHARED_OF_H200 = 232_448
#: Bytes of shared memory that the driver reserves for each block.
RESERVED = 1024


def _tile(row: ForwardRow) -> fa3.Fa3ForwardTile:
    return fa3.tile_of_row(mapped(head_dim=row.widest, head_dim_v=row.widest_v), row)


def test_the_limits_of_the_tests_are_those_of_an_h200() -> None:
    assert HOPPER.shared_per_block == SHARED_OF_H200


def test_shared_memory_of_a_narrow_row() -> None:
    tile = fa3.Fa3ForwardTile(192, 128, 3, 2, True, 64, 64)
    q = 2 * 192 * 64 * 2  # stages, rows, columns, bytes
    k = v = 3 * 128 * 64 * 2
    out = 12 * 16 * 64 * 2  # warps, rows, columns, bytes
    barriers = 2 * 3 * 2 + 3 * 4 + 2 * 2  # q: stages, warpgroups, full and empty; k, v; queue
    queue = 2 * 6 * 4  # slots, words
    assert q + k + v + out + 8 * barriers + queue == 172_304
    assert tile.footprint.shared_bytes == 173_056  # the next multiple of 1024
    assert tile in {_tile(row) for row in FORWARD}


def test_shared_memory_of_a_wide_row() -> None:
    tile = fa3.Fa3ForwardTile(128, 128, 2, 1, True, 192, 128)
    q = 128 * 192 * 2
    k, v = 2 * 128 * 192 * 2, 2 * 128 * 128 * 2
    out = 8 * 16 * 64 * 2
    barriers = 1 * 2 * 2 + 2 * 4 + 2 * 2
    assert q + k + v + out + 8 * barriers + 48 == 229_552
    assert tile.footprint.shared_bytes == 230_400
    assert tile in {_tile(row) for row in FORWARD}


def test_barriers_and_queue_have_their_bytes() -> None:
    """The rings are so deep that barriers and queue fill one KiB and begin another.

    With shallower rings, rounding to whole KiB would hide these bytes.
    """
    kib = [fa3.Fa3ForwardTile(128, 64, n, 1, True, 64, 64).footprint.shared_bytes for n in (25, 26)]
    assert 8 * (4 + 4 * 25 + 4) + 48 + 4 * 25 == 1012  # the last term: 4 bytes a stage
    assert kib[1] - kib[0] == 2 * 64 * 64 * 2 + 1024


def test_a_panel_is_as_wide_as_the_swizzle_even_where_the_head_is_not() -> None:
    """80 columns take one panel of 64 columns, and 16 columns of a second panel."""
    tile = fa3.Fa3ForwardTile(192, 96, 2, 2, True, 80, 80)
    as_wide = fa3.Fa3ForwardTile(192, 96, 2, 2, True, 128, 128)
    assert tile.footprint == as_wide.footprint


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_a_row_fits_at_every_width_that_it_serves(row: ForwardRow) -> None:
    for d, dv in product(BUCKETS, BUCKETS):
        if d <= row.widest and dv <= row.widest_v:
            tile = fa3.tile_of_row(mapped(head_dim=d, head_dim_v=dv), row)
            assert tile.footprint.excess(HOPPER) is None
            assert tile.footprint.shared_bytes <= SHARED_OF_H200
            assert tile.footprint.shared_bytes % 1024 == 0  # the swizzle's period
            blocks = tile.footprint.blocks_per_sm
            together = blocks * (tile.footprint.shared_bytes + RESERVED)
            assert together <= HOPPER.shared_per_sm


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_registers_move_within_what_the_block_has(row: ForwardRow) -> None:
    tile = _tile(row)
    constants = tile.constants()
    load, math = constants["load_registers"], constants["math_registers"]
    footprint = tile.footprint
    assert footprint.threads == 128 * (row.block_q // 64 + 1) <= 1024
    # Every warpgroup starts with what the launch bounds leave; setmaxnreg takes multiples of 8.
    start = footprint.registers
    blocks = footprint.blocks_per_sm
    assert start == min(65536 // (footprint.threads * blocks) // 8 * 8, 248)
    assert blocks * 128 * (load + tile.warpgroups * math) <= 65536
    assert load + tile.warpgroups * math <= start * (tile.warpgroups + 1)
    assert load < math <= (256 if tile.warpgroups * blocks == 1 else 240)
    assert load < start < math or tile.warpgroups * blocks == 1
    assert (load % 8, math % 8) == (0, 0)
    # The scores, the weights of the step before and the output leave some registers free.
    held = row.block_kv // 2 + row.block_kv // 4 + row.widest_v // 2
    assert held < math


def test_the_instructions_take_every_tile() -> None:
    """wgmma takes 8 to 256 columns in steps of 8, and a depth of 16; swizzles repeat in 8 rows."""
    for row in EVERY:
        assert row.block_q % 64 == 0
        assert row.block_kv % 16 == 0
        assert row.block_kv <= 256
        assert row.q_stages in (1, 2)
    assert all(width % 16 == 0 and width <= 256 for width in BUCKETS)
    assert list(BUCKETS) == sorted(set(BUCKETS))


def _head_group(**changes: object) -> tuple[int, int, int]:
    """The heads of a head group, all heads, and the bytes of one head's K and V."""
    wanted = mapped(**changes)
    head_group = even_head_group(wanted, HOPPER)
    assert dict(planned(wanted).launches[0].arguments) == {"head_group": head_group}
    width = wanted.head_dim + wanted.head_dim_v
    return head_group, wanted.batch * wanted.heads_q, 2 * wanted.seqlen_kv * width


def _is_even(heads: int, head_group: int) -> bool:
    """Whether the last head group has at least half as many heads as each other group."""
    return 2 * (heads % head_group or head_group) >= head_group


def _check_evenness(head_group: int, every: int, most: int) -> None:
    """Check that head groups are as few as possible, or a few more so that the last is even."""
    fewest = ceil_div(every, most)
    widest = ceil_div(every, fewest)
    assert widest // 2 < head_group <= widest
    wider = range(head_group + 1, widest + 1)
    assert not any(_is_even(every, s) for s in wider)
    if not _is_even(every, head_group):  # then no size is even
        assert head_group == widest
        assert not any(_is_even(every, s) for s in range(widest // 2 + 1, widest))


def test_a_head_group_is_what_the_cache_holds() -> None:
    room = HOPPER.l2 * 3 // 5
    for seqlen, width, batch, heads, group in product(
        (2, 512, 4096, 16384, 131072), (64, 128, 256), (1, 3, 16), (1, 4, 15, 32), (1, 2, 8)
    ):
        of = {"batch": batch, "heads_q": heads * group, "heads_kv": heads}
        head_group, every, of_head = _head_group(seqlen=seqlen, width=width, **of)
        assert 1 <= head_group <= every
        assert head_group <= group or head_group * of_head <= room * group
        most = min(every, max(1, room // of_head) * group)
        _check_evenness(head_group, every, most)


def test_sixteen_heads_in_head_groups() -> None:
    """16384 keys of 128 + 128 columns take 8 MiB a head; heads may fill 30 of L2's 50 MiB."""
    of = {"seqlen": 16384, "width": 128, "batch": 1}
    assert _head_group(heads_q=16, heads_kv=16, **of)[0] == 2  # eight head groups, not 3, ..., 3, 1
    assert _head_group(heads_q=15, heads_kv=15, **of)[0] == 3
    assert _head_group(heads_q=17, heads_kv=17, **of)[0] == 3  # the last one has two
    assert _head_group(heads_q=16, heads_kv=4, **of)[0] == 8  # of two kv heads each; not 12 and 4
    assert _head_group(heads_q=32, heads_kv=1, **of)[0] == 32


def test_the_last_head_group_is_at_least_half_of_the_others() -> None:
    """Five heads of 6 MiB would fit, but groups of five would leave two of the 32 heads."""
    room = HOPPER.l2 * 3 // 5
    of = {"seqlen": 8192, "width": 192, "batch": 1}
    head_group, every, of_head = _head_group(heads_q=32, heads_kv=32, **of)
    assert (head_group, every, of_head) == (4, 32, 6 << 20)
    assert room // of_head == 5
    uneven = 0
    for heads in range(1, 200):
        head_group, every, _ = _head_group(heads_q=heads, heads_kv=heads, **of)
        _check_evenness(head_group, every, min(heads, 5))
        uneven += not _is_even(every, head_group)
    assert uneven < 20  # one is 37: groups of 5, 4 and 3 leave 2, 1 and 1 heads


def test_without_a_mask_heads_come_singly() -> None:
    chosen = planned(mapped(mask="full", seqlen=16384))
    assert dict(chosen.launches[0].arguments) == {"head_group": 1}

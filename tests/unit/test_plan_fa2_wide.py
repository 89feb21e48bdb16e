"""Tiles of FlashAttention-2's forward pass for wide heads: pairs of warps, single stages."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from cuflash.planning.problem import DTYPES
from cuflash.planning.tiles import fa2
from cuflash.planning.tiles.common import HEAD_DIM_BUCKETS
from cuflash.planning.tiles.fa2_tables import FORWARD, ForwardRow

from ..architectures import KIB, LIMITS
from .test_plan import problem
from .test_plan_fa2 import planned

#: Enough heads and queries that every multiprocessor has work.
_MANY = {"batch": 8, "heads_q": 16, "heads_kv": 16, "seqlen_q": 4096}
#: (block_q, block_kv, paired, num_stages), by widths and keys on compute capability 9.0.
_PLAIN = (128, 64, False, 2)
_PAIRED = (128, 64, True, 2)
_SINGLE = (64, 64, False, 1)
_TAKEN = {
    ((128, 128), 512): _PLAIN,
    ((128, 128), 1024): _PLAIN,
    ((129, 40), 1024): _SINGLE,
    ((160, 160), 512): _SINGLE,
    ((160, 160), 1024): _SINGLE,
    ((192, 128), 1024): _SINGLE,
    ((192, 192), 512): _SINGLE,
    ((192, 192), 1024): _SINGLE,
    ((193, 64), 1024): _PAIRED,
    ((256, 256), 512): _SINGLE,
    ((256, 256), 1023): _SINGLE,
    ((256, 256), 1024): _PAIRED,
    ((256, 192), 1024): _PAIRED,
    ((64, 256), 1024): _PAIRED,
    ((256, 32), 1024): _PAIRED,
}
#: Buckets of head_dim and head_dim_v that pairs of warps take, by KiB of a block's shared memory.
_PAIRS_OF_KIB = {
    64: [],
    99: [(16, 256), (32, 256)],
    163: [*((d, 256) for d in (16, 32, 64, 96, 128)), (256, 32), (256, 64)],
    227: [
        *((d, 256) for d in (16, 32, 64, 96, 128, 192)),
        *((256, dv) for dv in (32, 64, 96, 128, 192, 256)),
    ],
}
#: Architectures whose shared memory holds the tile of pairs at the widest heads.
_LARGE = ("90", "100")


def _wide(dims: tuple[int, int], seqlen_kv: int, **more: Any) -> Any:
    return problem(**_MANY, head_dim=dims[0], head_dim_v=dims[1], seqlen_kv=seqlen_kv, **more)


def _form(tile: Any) -> tuple[int, int, bool, int]:
    return tile.block_q, tile.block_kv, tile.paired, tile.num_stages


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("dims", "seqlen_kv"), _TAKEN, ids=str)
def test_widths_and_keys_decide(dims: tuple[int, int], seqlen_kv: int, dtype: str) -> None:
    chosen = planned(_wide(dims, seqlen_kv, storage=dtype), LIMITS["90"])
    assert _form(chosen.tile) == _TAKEN[dims, seqlen_kv]
    constants = dict(chosen.launches[0].config.constants)
    asked = chosen.tile.paired, chosen.tile.num_stages
    assert (constants["paired"], constants["num_stages"]) == asked


@pytest.mark.parametrize("width", [192, 256])
def test_blocks_that_are_alone_have_two_stages(width: int) -> None:
    """Each of 128 blocks has its own multiprocessor; some of 256 blocks share one."""
    lengths = {"batch": 1, "seqlen_q": 2048, "seqlen_kv": 2048}
    for heads, stages in ((4, 2), (8, 1)):
        few = problem(**lengths, heads_q=heads, heads_kv=heads, head_dim=width, head_dim_v=width)
        chosen = planned(few, LIMITS["90"])
        assert _form(chosen.tile) == (64, 64, False, stages)
        if (width, heads) == (192, 4):
            assert "alone" in chosen.reason


@pytest.mark.parametrize("architecture", LIMITS)
def test_pairs_are_where_shared_memory_is(architecture: str) -> None:
    """The widest heads have pairs where shared memory holds them; all chosen tiles fit."""
    limits = LIMITS[architecture]
    for dims, seqlen_kv in product(product((160, 192, 256), repeat=2), (512, 1024, 100_000)):
        tile = planned(_wide(dims, seqlen_kv), limits).tile
        assert tile.footprint.excess(limits) is None
        if dims == (256, 256):
            assert tile.paired == (architecture in _LARGE and seqlen_kv >= 1024)


@pytest.mark.parametrize("architecture", LIMITS)
def test_widths_of_pairs_follow_shared_memory(architecture: str) -> None:
    found = [
        dims
        for dims in product(HEAD_DIM_BUCKETS, repeat=2)
        if planned(_wide(dims, 100_000), LIMITS[architecture]).tile.paired
    ]
    assert found == _PAIRS_OF_KIB[LIMITS[architecture].shared_per_block // KIB]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_pairs_and_single_stages_are_of_16_bits(dtype: str) -> None:
    for dims in product((192, 256), repeat=2):
        tile = planned(_wide(dims, 100_000, storage=dtype), LIMITS["90"]).tile
        assert not tile.paired
        assert tile.num_stages == 2


def test_halves_that_are_not_whole_are_refused() -> None:
    """Sixteen columns of an output, or sixteen keys of a tile, do not divide between two warps."""
    row, limits = ForwardRow(256, 128, 64, 8, paired=True), LIMITS["90"]
    narrow, wide = _wide((256, 16), 1024), _wide((256, 17), 1024)
    assert not list(fa2._forward(narrow, limits, row))
    assert list(fa2._forward(wide, limits, row))
    assert list(fa2._forward(narrow, limits, row._replace(paired=False)))
    assert not list(fa2._forward(wide, limits, row._replace(block_kv=16)))
    assert not planned(narrow, limits).tile.paired


def test_rows_that_are_no_fragment_for_every_pair_are_refused() -> None:
    limits, wanted = LIMITS["90"], _wide((256, 256), 1024)
    row = ForwardRow(256, 64, 64, 8, paired=True)  # 16 rows for each pair
    assert list(fa2._forward(wanted, limits, row))
    assert not list(fa2._forward(wanted, limits, row._replace(warps=16)))
    assert not list(fa2._forward(wanted, limits, row._replace(paired=False)))


def test_fused_multiply_adds_have_no_pairs() -> None:
    row = ForwardRow(256, 64, 32, 4, paired=True)
    wanted = _wide((64, 64), 1024, storage="float32")
    assert not list(fa2._forward(wanted, LIMITS["75"], row))
    assert list(fa2._forward(wanted, LIMITS["75"], row._replace(paired=False)))


def test_shared_memory_of_either_form() -> None:
    """It has room for Q, and for K and V by stage; with pairs also P and two numbers for a row."""
    pair = planned(_wide((256, 192), 1024), LIMITS["90"]).tile
    q, k, v, p = 128 * 256, 64 * 256, 64 * 192, 128 * 64
    numbers = 128 * 2 * 4
    assert pair.footprint.shared_bytes == 2 * (q + 2 * (k + v) + p) + numbers
    one = planned(_wide((256, 192), 512), LIMITS["90"]).tile
    line = 128  # for P, although without pairs P is not in shared memory
    assert one.footprint.shared_bytes == 2 * (64 * 256 + k + v) + line
    assert one.footprint.blocks_per_sm == 2
    widest = planned(_wide((256, 256), 1024), LIMITS["90"]).tile
    assert widest.footprint.shared_bytes == 209 * KIB


def test_halves_in_registers() -> None:
    """The two warps of a pair together hold as many numbers as one warp would for their rows."""
    pair = planned(_wide((256, 256), 1024), LIMITS["90"]).tile
    alone = replace(pair, paired=False, warps=pair.warps // 2)
    fixed = 56
    assert 2 * (pair.footprint.registers - fixed) == alone.footprint.registers - fixed
    assert alone.footprint.excess(LIMITS["90"]) is not None


def test_every_row_of_pairs_is_whole_at_the_widest_heads() -> None:
    """With half a tile a power of two, the offset of a half and a lane's chunk share no bits."""
    rows = [row for size in DTYPES.values() for row in FORWARD[size.itemsize] if row.paired]
    assert rows
    for row in rows:
        assert row.wider_than == 192
        half = row.block_kv // 2
        assert half & (half - 1) == 0

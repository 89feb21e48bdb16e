"""The needs of FlashAttention-3's backward pass: shared memory and registers."""

from __future__ import annotations

import pytest

from cuflash.planning.tiles import fa3
from cuflash.planning.tiles.fa3_tables import BACKWARD, BackwardRow

from .test_plan_fa3 import HOPPER, planned
from .test_plan_fa3_backward import of_gradients, problem_of
from .test_plan_fa3_limits import SHARED_OF_H200

#: Bytes that one copy clears, in tiles with room for them.
ZEROS = 4096


def _rounded(count: int, to: int) -> int:
    return -(-count // to) * to


def test_shared_memory_of_the_narrow_tile() -> None:
    kv = 2 * 128 * 64 * 2  # K and V: rows, columns, bytes
    rings = 2 * 2 * 128 * 64 * 2  # Q and dO: stages, rows, columns, bytes
    scores = 2 * 128 * 128 * 2  # dS: stages, queries, keys, bytes
    staging = 8 * 16 * 64 * 2  # warps, rows, columns, bytes
    rows = 2 * 2 * 128 * 4  # lse and delta: stages, rows, bytes
    # Barriers for K and V, Q and dO, dS (full and empty), cleared sums, and turns.
    barriers = 2 + 2 * 2 + 2 * 2 + 1 + 6
    assert staging == 16 << 10
    assert kv + rings + scores + staging + rows + 8 * barriers == 182_408
    assert 182_528 % 128 == 0  # the next multiple, where zeros lie
    assert 182_528 + ZEROS == 186_624
    assert planned(of_gradients(width=64)).tile.footprint.shared_bytes == 187_392  # 183 KiB


def test_shared_memory_of_the_wide_tile() -> None:
    kv, rings = 2 * 128 * 128 * 2, 2 * 2 * 64 * 128 * 2
    scores, staging, rows = 2 * 64 * 128 * 2, 8 * 16 * 64 * 2, 2 * 2 * 64 * 4
    assert kv + rings + scores + staging + rows + 8 * (2 + 2 * 2 + 2 * 2 + 1 + 6) == 181_384
    assert 181_504 % 128 == 0
    assert 181_504 + ZEROS == 185_600
    assert planned(of_gradients(width=128)).tile.footprint.shared_bytes == 186_368  # 182 KiB


def test_shared_memory_where_warpgroups_share_keys() -> None:
    scores, staging, rows = 2 * 64 * 64 * 2, 8 * 16 * 64 * 2, 2 * 2 * 64 * 4
    for d, width, whole in ((256, 256, 232_448), (128, 192, 183_296)):
        tiles = (64 + 2 * 64) * 2 * width * 2  # K and Q in two stages, V and dO
        used = tiles + scores + staging + rows + _rounded(8 * 17, 128) + 1024  # zeros
        assert whole - 1024 < used <= whole
        wanted = of_gradients(head_dim=d, head_dim_v=width)
        assert planned(wanted).tile.footprint.shared_bytes == whole


def test_shared_memory_where_scores_are_queries_by_keys() -> None:
    """P has one buffer, dS two; 96 keys of a row of scores take two panels. There is no staging."""
    tiles = (96 + 2 * 64) * 2 * 192 * 2  # K and Q in two stages, V and dO
    scores, rows = (1 + 2) * 64 * 128 * 2, 2 * 2 * 64 * 4
    used = tiles + scores + rows + _rounded(8 * 17, 128) + 1024  # zeros
    assert used == 223_488
    assert planned(of_gradients(width=192)).tile.footprint.shared_bytes == 224_256  # 219 KiB


def test_shared_memory_where_each_half_of_k_begins_a_panel() -> None:
    """A half of 48 columns takes a panel of 64, a half of 96 takes two; only K is halved."""
    scores, staging, rows = 2 * 64 * 128 * 2, 8 * 16 * 64 * 2, 2 * 2 * 64 * 4
    for d, dv, of_k, of_v, zeros, whole in (
        (96, 96, 2 * 64, 128, 2048, 184_320),
        (192, 128, 2 * 128, 128, 512, 231_424),
    ):
        of_q = _rounded(d, 64)
        tiles = 128 * (of_k + of_v) * 2 + 2 * 64 * (of_q + of_v) * 2  # K and V, Q and dO
        used = tiles + scores + staging + rows + _rounded(8 * 17, 128) + zeros
        assert whole - 1024 < used <= whole
        wanted = of_gradients(head_dim=d, head_dim_v=dv)
        assert planned(wanted).tile.footprint.shared_bytes == whole


@pytest.mark.parametrize(("block_q", "stages", "beyond"), [(4, 18, 8), (4, 39, 1016)])
def test_barriers_lse_and_delta_have_their_bytes(block_q: int, stages: int, beyond: int) -> None:
    """The rings are so deep that the last barrier begins a KiB or nearly fills one.

    With other depths, rounding to a KiB would hide an error. The four records of listed steps take
    the memory of two barriers each.
    """
    fixed = 2 * 128 * 64 * 2 + 2 * block_q * 128 * 2 + (16 << 10)  # K and V, dS, staging
    of_stage = 2 * block_q * 64 * 2 + 2 * block_q * 4  # Q and dO, lse and delta
    whole = fixed + stages * of_stage + 8 * (2 + 2 * stages + 4 + 1 + 6 + 8)
    assert whole % 1024 == beyond
    tile = fa3.Fa3BackwardTile(block_q, 128, stages, 64, 64)
    assert tile.footprint.shared_bytes == _rounded(_rounded(whole, 128) + ZEROS, 1024)


def _tile_of(row: BackwardRow) -> fa3.Fa3BackwardTile:
    blocks = row.block_q, row.block_kv, row.kv_tiles_per_convert_block
    (found,) = (
        tile
        for tile in fa3.candidates(problem_of(row), HOPPER, every=True)
        if isinstance(tile, fa3.Fa3BackwardTile)
        and (tile.head_dim, tile.head_dim_v) == (row.widest, row.widest_v)
        and (tile.block_q, tile.block_kv, tile.kv_tiles_per_convert_block) == blocks
    )
    return found


@pytest.mark.parametrize("row", BACKWARD, ids=str)
def test_a_row_fits_and_its_registers_move_within_what_the_block_has(row: BackwardRow) -> None:
    tile = _tile_of(row)
    constants, footprint = tile.constants(), tile.footprint
    assert footprint.excess(HOPPER) is None
    assert footprint.shared_bytes <= SHARED_OF_H200
    assert footprint.shared_bytes % 1024 == 0  # the swizzle's period
    warpgroups = tile.warpgroups
    assert footprint.threads == 128 * (warpgroups + 1)
    start = footprint.registers
    assert start == 65536 // footprint.threads // 8 * 8
    load, math = constants["load_registers"], constants["math_registers"]
    assert load + warpgroups * math <= start * (warpgroups + 1)
    assert 24 <= load < start < math <= 240  # setmaxnreg begins at 24
    assert (load % 8, math % 8) == (0, 0)
    # A thread holds dK and dV of 64 keys, and scores and dP of one q tile. In serial tiles it holds
    # one of the latter two beside P rounded. If warpgroups share keys, it holds dK or dV, P or dS
    # rounded, and columns of dQ.
    operand = row.block_q // 4  # P or dS, rounded
    if row.block_kv == 128:
        of_keys = (row.widest + row.widest_v) // 2
        serial = row.widest + row.widest_v > 256
        assert of_keys + (operand + row.block_q // 2 if serial else row.block_q) < math
        assert not serial or of_keys + row.widest // 4 < math  # half the columns of dQ
    else:
        of_keys = max(row.widest, row.widest_v) * row.block_kv // 128
        assert of_keys + row.block_q * row.block_kv // 256 + 128 // 2 < math
    assert row.block_q % 64 == 0
    assert row.block_q <= 256  # the most rows of a box
    assert {name: constants[name] for name in ("block_q", "block_kv", "num_stages")} == {
        "block_q": row.block_q,
        "block_kv": row.block_kv,
        "num_stages": row.num_stages,
    }
    assert (constants["score_stages"], constants["fragment_rows"]) == (2, 16)
    # A block that converts sums has 16 rows of 64 columns for each warp, and three words for each
    # of its kv tiles.
    rows = footprint.threads // 32 * 16 * 64 * 2 + row.kv_tiles_per_convert_block * 3 * 4
    assert constants["kv_tiles_per_convert_block"] == row.kv_tiles_per_convert_block
    assert rows <= footprint.shared_bytes

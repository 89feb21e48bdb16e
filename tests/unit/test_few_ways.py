"""Ways of few queries: rows of a block, its loads, and where chunks are merged."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cuflash.features.packed_group import with_packed_group
from cuflash.planning import fa2_few
from cuflash.planning.fa2_few_time import FewWork
from cuflash.planning.invariant import batch_invariant_plan
from cuflash.planning.key_chunks import chunk_of
from cuflash.planning.plan import plan
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles.common import ceil_div
from cuflash.planning.tiles.fa2_few import Fa2FewTile, few_tiles, merging_tile

from ..architectures import LIMITS
from .test_forward_time import few

H200 = LIMITS["90"]


def _tiles(problem: AttentionProblem) -> tuple[Fa2FewTile, ...]:
    return few_tiles(with_packed_group(problem), H200)


def test_heads_that_share_a_block_may_have_two_with_fewer_rows() -> None:
    assert [tile.rows for tile in _tiles(few(1, (32, 8), (8, 8192)))] == [32, 16]
    assert [tile.rows for tile in _tiles(few(1, (32, 8), (1, 8192)))] == [16]
    assert [tile.rows for tile in _tiles(few(1, (32, 8), (8, 8192), 256))] == [16]
    unlike = _tiles(few(1, (34, 2), (2, 8192)))  # 17 heads of a query do not fit 16 rows
    assert [(tile.heads, tile.rows) for tile in unlike] == [(17, 32), (0, 16)]
    assert _tiles(few(1, (32, 8), (17, 8192))) == ()


#: Entries, queries, keys, heads and width: rows, chunk, whether blocks merge, and slots of a ring,
#: as `attention` and as `attention_with_kvcache` take them.
_TAKEN = {
    (1, 8, 32768, 32, 8, 128): ((16, 4096, False, 6), (16, 4096, False, 6)),
    (8, 8, 32768, 32, 8, 128): ((16, 0, False, 6), (16, 4096, True, 4)),
    (9, 1, 8192, 32, 8, 128): ((16, 0, False, 3), (16, 1024, True, 5)),
    (12, 1, 8192, 32, 8, 128): ((16, 0, False, 3), (16, 1024, True, 3)),
    (16, 1, 8192, 32, 8, 128): ((16, 0, False, 6), (16, 1024, True, 5)),
    (1, 1, 4096, 64, 8, 128): ((16, 512, False, 3), (16, 512, False, 3)),
    (8, 1, 8192, 16, 2, 256): ((16, 2048, False, 2), (16, 512, False, 3)),
}


@pytest.mark.parametrize("sizes", _TAKEN)
def test_the_ways_that_were_timed_as_the_fastest_are_taken(sizes: tuple[int, ...]) -> None:
    batch, queries, keys, heads_q, heads_kv, width = sizes
    last = {"mask": "causal", "q_offset": keys - queries} if queries > 1 else {}
    problem = few(batch, (heads_q, heads_kv), (queries, keys), width, **last)
    for make, wanted in zip((plan, batch_invariant_plan), _TAKEN[sizes], strict=True):
        chosen = make(problem, H200)
        tile = chosen.tile
        assert isinstance(tile, Fa2FewTile)
        chunk = chunk_of(chosen.problem) or tile.chunk
        assert (tile.rows, chunk, tile.chunk > 0, tile.num_slots) == wanted


def _works(blocks: int, keys: int = 8192) -> list[FewWork]:
    problem = with_packed_group(few(blocks, (1, 1), (1, keys)))
    return list(fa2_few._works(problem, H200, few_tiles(problem, H200), 1024))


def test_loads_are_even_where_many_but_not_all_multiprocessors_have_a_block() -> None:
    """Blocks that merge chunks leave the memory to others meanwhile, so there from more on."""
    slots = {blocks: [w.tile.num_slots for w in _works(blocks)][1] for blocks in range(60, 125)}
    assert {blocks for blocks, few_slots in slots.items() if few_slots == 3} == {*range(76, 119)}
    assert set(slots.values()) == {3, 5}
    split = {n: _works(n, 1024)[0].tile.num_slots for n in range(50, 125)}
    assert {blocks for blocks, few_slots in split.items() if few_slots == 3} == {*range(60, 119)}
    assert set(split.values()) == {3, 6}


def test_loads_of_float8_and_of_many_rows_stay() -> None:
    for blocks in (70, 90, 110):
        problem = replace(few(blocks, (1, 1), (1, 8192)), float8=True)
        tiles = few_tiles(problem, H200)
        whole, merging = fa2_few._works(problem, H200, tiles, 1024)
        assert whole.tile == tiles[0]
        assert merging.tile == merging_tile(tiles[0], H200, 1024)
    drafted = few(9, (32, 8), (8, 8192))
    wide, narrow = fa2_few._works(drafted, H200, _tiles(drafted), 0)
    assert (wide.tile, narrow.tile) == _tiles(drafted)  # 72 blocks and 144


@pytest.mark.parametrize("width", [64, 128, 192, 256])
@pytest.mark.parametrize("architecture", ["80", "86", "90"])
def test_even_loads_have_room_for_results(architecture: str, width: int) -> None:
    """And 96 KiB on their way, if the ring had as much."""
    limits = LIMITS[architecture]
    for queries, heads in ((1, 1), (16, 1), (8, 4)):
        problem = with_packed_group(few(1, (heads, 1), (queries, 8192), width))
        for tile in few_tiles(problem, limits):
            even = tile.with_even_loads()
            slot = tile.warps * 2 * tile.block_kv * max(tile.head_dim, tile.head_dim_v)
            results = 4 * tile.result_rows * (tile.head_dim_v + 8) * tile.warps
            needed = max(2, ceil_div(96 * 1024, slot), ceil_div(results, slot))
            assert even.num_slots == min(tile.num_slots, needed)
            assert replace(even, num_slots=tile.num_slots) == tile
            assert even.footprint.excess(limits) is None
            assert even.fitted(limits) == even


@given(
    batch=st.integers(1, 200),
    queries=st.integers(1, 16),
    keys=st.integers(1, 20_000),
    heads=st.tuples(st.sampled_from([1, 2, 3, 4, 8, 17]), st.integers(1, 8)),
    width=st.sampled_from([32, 64, 128, 192, 256]),
    float8=st.booleans(),
    chunk=st.sampled_from([None, 0, 64, 1024]),
)
def test_the_way_that_is_taken_is_one_that_is_compiled_ahead(
    batch: int,
    queries: int,
    keys: int,
    heads: tuple[int, int],
    width: int,
    float8: bool,
    chunk: int | None,
) -> None:
    plain = few(batch, (heads[0] * heads[1], heads[1]), (queries, keys), width)
    problem = with_packed_group(replace(plain, float8=float8))
    tiles = few_tiles(problem, H200)
    assume(tiles)  # not for one query of 17 heads
    tile, keys_of_chunk = fa2_few.fastest_way(problem, H200, tiles, chunk)
    if chunk is not None:
        assert keys_of_chunk or tile.chunk == chunk
    assert not (keys_of_chunk and tile.chunk)
    offered = {
        (replace(one, chunk=one.chunk > 0), split > 0)
        for one, split in fa2_few.every_way(problem, H200, tiles)
    }
    assert (replace(tile, chunk=tile.chunk > 0), keys_of_chunk > 0) in offered

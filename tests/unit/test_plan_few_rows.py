"""Plans of forward passes for few queries."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cuflash.features.table import with_features
from cuflash.features.use import Operand
from cuflash.planning.key_chunks import chunk_of
from cuflash.planning.plan import plan
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles.common import ceil_div
from cuflash.planning.tiles.fa2_few import Fa2FewTile, few_tiles

from ..architectures import LIMITS
from .test_forward_time import few

H200 = LIMITS["90"]


@pytest.mark.parametrize("keys", [2**26, 2**26 + 1, 2**29])
def test_few_queries_have_the_longest_chunk_for_any_number_of_keys(keys: int) -> None:
    chosen = plan(few(1, (1, 1), (1, keys), 64, storage="float16"), H200)
    assert isinstance(chosen.tile, Fa2FewTile)
    assert chunk_of(chosen.problem) == 2**20
    assert chosen.launches[0].grid == ceil_div(keys, 2**20)


def test_a_chunk_of_other_tiles_than_those_for_few_queries_has_the_usual_order() -> None:
    problem = few(2, (4, 2), (1, 1000), 64, storage="float16")
    assert isinstance(plan(problem, H200, kv_chunk=96).tile, Fa2FewTile)
    assert plan(problem, H200, kv_chunk=80).algorithm == "fa3"


def _grouped(group: int, queries: int, width: int = 128) -> AttentionProblem:
    return few(3, (2 * group, 2), (queries, 300), width, storage="float16")


def _tile(problem: AttentionProblem) -> Fa2FewTile:
    tile = few_tiles(problem, H200)[0]
    assert tile.footprint.excess(H200) is None
    return tile


#: Query heads of a kv head, and queries: the heads and rows of a block (0 heads: it has one head),
#: and the blocks that share the queries of a tile.
_HEADS = {
    (1, 16): (0, 16, 1),
    (8, 2): (8, 16, 1),
    (8, 3): (8, 32, 1),
    (3, 5): (3, 16, 1),
    (3, 16): (3, 32, 2),  # ten queries, then six
    (12, 5): (6, 32, 1),  # two blocks; all twelve heads, with two queries each, would need three
    (12, 8): (4, 32, 1),
    (16, 16): (16, 32, 8),
    (40, 3): (10, 32, 1),
    (64, 2): (32, 32, 2),
    (37, 4): (0, 16, 1),  # no divisor but 1 fits
}


@pytest.mark.parametrize(("group", "queries"), _HEADS)
def test_the_keys_of_a_head_are_read_by_the_fewest_blocks(group: int, queries: int) -> None:
    problem, (heads, rows, parts) = _grouped(group, queries), _HEADS[group, queries]
    chosen = plan(problem, H200, kv_chunk=0)
    tile = chosen.tile
    assert isinstance(tile, Fa2FewTile)
    assert (tile.heads, tile.rows, tile.block_q) == (heads, rows, 16)
    assert tile.result_rows == (rows if heads or queries > 8 else 8)
    constants = dict(chosen.launches[0].config.constants)
    assert (constants["packs_heads"], constants["rows"]) == (heads > 0, rows)
    arguments = dict(chosen.launches[0].arguments)
    assert (arguments["heads_of_block"], arguments["parts"]) == (max(1, heads), parts)
    assert chosen.launches[0].grid == 3 * 2 * group // max(1, heads) * parts


def test_every_chunk_of_keys_has_all_blocks_of_a_tile() -> None:
    chosen = plan(_grouped(16, 16), H200, kv_chunk=64)
    assert chosen.launches[0].grid == 5 * 3 * 2 * 8


def test_wide_heads_have_sixteen_rows() -> None:
    for group, queries, heads in ((8, 2, 8), (8, 16, 8), (40, 2, 8), (3, 16, 0), (17, 2, 0)):
        tile = _tile(_grouped(group, queries, 192))
        assert (tile.heads, tile.rows) == (heads, 16)


def test_heads_share_a_block_with_sinks_and_not_with_slopes() -> None:
    sinks, slopes = (Operand(name, "float32", (16,)) for name in ("sinks", "alibi_slopes"))
    for queries, rows in ((1, 16), (4, 32)):
        problem = _grouped(8, queries)
        asked = _tile(with_features(problem, {"softcap": 2.0}, {"sinks": sinks}))
        assert (asked.heads, asked.rows) == (8, rows)
        assert _tile(with_features(problem, {}, {"alibi_slopes": slopes})).heads == 0


def test_a_whole_tile_of_packed_queries_is_shared() -> None:
    """An entry may have more queries than was said."""
    problem = replace(_grouped(3, 40), batch=1, sequences=5, most_queries=4)
    tile = _tile(problem)
    assert (tile.heads, tile.rows) == (3, 16)
    assert tile.parts(problem) == 4  # of five queries
    assert tile.blocks(problem) == 2 * (40 + 5 * 15) // 16 * 4

"""Batch-invariant plans: what a batch may not change, and what a caller asks for."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from cuflash.features.packed_group import with_packed_group
from cuflash.planning import invariant
from cuflash.planning.device import HostLimits
from cuflash.planning.forward_time import ForwardWork
from cuflash.planning.invariant import batch_invariant_plan
from cuflash.planning.key_chunks import chunk_of
from cuflash.planning.plan import Plan, plan
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles.fa2_few import Fa2FewTile, few_tiles, with_whole_rows

from ..architectures import LIMITS
from .test_forward_time import few
from .test_packed_queries import _plan

H200 = LIMITS["90"]
HOST = HostLimits(cache=1 << 20)


def test_the_numpy_code_has_what_is_asked_for() -> None:
    problem = few(3, (8, 2), (40, 300), storage="float32")
    for asked in ({"algorithm": "fa1"}, {"algorithm": "fa2"}, {"blocks": (32, 48)}):
        of_call: dict[str, Any] = asked
        assert batch_invariant_plan(problem, HOST, **of_call) == plan(problem, HOST, **of_call)
    algorithms = (plan(problem, HOST, algorithm=one).algorithm for one in ("fa1", "fa2"))
    assert {*algorithms} == {"fa1", "fa2"}


@pytest.mark.parametrize("batch", [1, 8, 200])
@pytest.mark.parametrize("blocks", [None, (64, 64), (128, 64)])
def test_fa1_has_the_blocks_of_a_usual_batch(batch: int, blocks: Any) -> None:
    problem = few(8, (8, 8), (700, 700), 64, storage="float16")
    usual = plan(problem, H200, algorithm="fa1", blocks=blocks)
    own = replace(problem, batch=batch)
    chosen = batch_invariant_plan(own, H200, algorithm="fa1", blocks=blocks)
    assert (chosen.tile.block_q, chosen.tile.block_kv) == (usual.tile.block_q, usual.tile.block_kv)
    assert (chosen.problem, chosen.reason) == (own, usual.reason)


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("chunk", [0, 512, 2048])
def test_chunks_that_are_asked_for_are_taken_in_any_batch(algorithm: Any, chunk: int) -> None:
    for batch, queries in product((1, 9, 64), (1, 40)):
        problem = few(batch, (32, 8), (queries, 8192), storage="float16")
        chosen = batch_invariant_plan(problem, H200, algorithm=algorithm, kv_chunk=chunk)
        assert (chunk_of(chosen.problem) or getattr(chosen.tile, "chunk", 0)) == chunk
        assert chosen.algorithm == algorithm


def test_blocks_that_are_asked_for_are_walked_whole_in_any_batch() -> None:
    for batch in (1, 9, 64):
        chosen = batch_invariant_plan(few(batch, (32, 8), (1, 8192)), H200, blocks=(64, 64))
        assert (chosen.tile.block_q, chosen.tile.block_kv) == (64, 64)
        assert chunk_of(chosen.problem) == 0


def test_reasons_say_that_a_choice_is_for_all_batches() -> None:
    chosen = batch_invariant_plan(few(1, (32, 8), (1, 8192)), H200)
    assert chosen.reason == "for few queries, in batches of any size"
    assert chosen.rejected == plan(few(8, (32, 8), (1, 8192)), H200).rejected
    of_fa3 = batch_invariant_plan(few(1, (32, 8), (17, 8192)), H200)
    assert of_fa3.reason == "nearly the fastest in batches of any size"


def _packed(problem: AttentionProblem, entries: int, total: int) -> AttentionProblem:
    most = problem.seqlen_q
    return replace(problem, batch=1, seqlen_q=total, sequences=entries + 1, most_queries=most)


#: Heads, queries of an entry and width whose tile has results of half its rows, and no room for
#: those of all; and the devices.
_HALVES = {"80": (256, 4), "86": (128, 2), "89": (128, 8), "120": (128, 1)}


@pytest.mark.parametrize("architecture", _HALVES)
def test_packed_queries_have_results_of_every_row(architecture: str) -> None:
    """If they do not fit, the tile is the one for entries with as many queries as need them."""
    limits, (width, most) = LIMITS[architecture], _HALVES[architecture]
    unpacked = few(8, (8, 8), (most, 4096), width, storage="float16")
    (own,) = few_tiles(unpacked, limits)
    assert (own.result_rows, with_whole_rows(own, limits)) == (8, None)
    whole = batch_invariant_plan(replace(unpacked, seqlen_q=9), limits, algorithm="fa2")
    assert isinstance(whole.tile, Fa2FewTile)
    chunk = chunk_of(whole.problem) or whole.tile.chunk
    for entries, total in ((1, most), (5, 2 * most), (64, 64 * most)):
        packed = _packed(unpacked, entries, total)
        chosen = batch_invariant_plan(packed, limits, algorithm="fa2")
        tile = chosen.tile
        assert isinstance(tile, Fa2FewTile)
        assert tile.result_rows == tile.rows == 16
        assert tile.footprint.excess(limits) is None
        assert (tile.warps, tile.block_kv) == (whole.tile.warps, whole.tile.block_kv)
        assert (chunk_of(chosen.problem) or tile.chunk) == chunk


def test_whole_tiles_that_fit_have_the_chunk_of_fewer_queries() -> None:
    unpacked = few(8, (8, 8), (2, 4096), 64, storage="float16")
    alone = batch_invariant_plan(unpacked, H200, algorithm="fa2")
    chosen = batch_invariant_plan(_packed(unpacked, 8, 16), H200, algorithm="fa2")
    for made, rows in ((alone, 8), (chosen, 16)):
        assert isinstance(made.tile, Fa2FewTile)
        assert made.tile.result_rows == rows
    chunks = {chunk_of(made.problem) or made.tile.chunk for made in (alone, chosen)}
    assert len(chunks) == 1


@pytest.mark.parametrize("most", [1025, 3000, 70_000])
@pytest.mark.parametrize("causal", [False, True])
def test_entries_of_many_packed_queries_have_their_own_tile(most: int, causal: bool) -> None:
    unpacked = _plan(8, most, None, 8192, causal=causal)
    packed = _plan(3, most + 100, most, 8192, causal=causal)
    assert (packed.tile, packed.algorithm) == (unpacked.tile, unpacked.algorithm)
    assert chunk_of(packed.problem) == chunk_of(unpacked.problem)


def test_one_packed_query_is_planned_like_two() -> None:
    """Heads of a lone query could be rows of one tile; those of packed queries are not."""
    for capacity in (1024, 8192, 131072):
        one, two = (_plan(6, 6, most, capacity, causal=True) for most in (1, 2))
        assert (one.tile, one.algorithm) == (two.tile, two.algorithm)
        assert chunk_of(one.problem) == chunk_of(two.problem)
    two_of_eight = _packed(few(8, (64, 8), (2, 8192)), 5, 9)  # 8 heads of a group
    assert batch_invariant_plan(two_of_eight, H200).tile.rows == 16


@pytest.mark.parametrize("window", [None, (100, 0), (100, None), (None, 3), (100, 3), "causal"])
def test_other_totals_have_the_choice_of_the_first(window: Any) -> None:
    options = {"causal": True} if window == "causal" else {"window_size": window}
    invariant._choice.cache_clear()
    for total in (7, 8, 27):
        _plan(3, total, 5, 8192, **options)
    assert invariant._choice.cache_info().misses == 1


@pytest.mark.parametrize("keys", [8192, 131072])
@pytest.mark.parametrize("width", [64, 128])
def test_fa3_has_a_tile_and_a_chunk_that_are_nearly_the_fastest(width: int, keys: int) -> None:
    """In no batch is the predicted time 1.2 times that of the plan that knows the batch."""
    taken = set()
    for batch in (1, 2, 3, 8, 24, 64, 128):
        problem = few(batch, (64, 8), (1, keys), width)
        made = [make(problem, H200, algorithm="fa3") for make in (batch_invariant_plan, plan)]
        times = [_time_of_fa3(chosen) for chosen in made]
        assert times[0] < 1.2 * times[1], batch
        taken.add((made[0].tile, chunk_of(made[0].problem)))
    assert len(taken) == 1


def _time_of_fa3(chosen: Plan) -> float:
    tile, packed = chosen.tile, with_packed_group(chosen.problem)
    blocks = tile.block_q, tile.block_kv, tile.blocks_per_sm
    return ForwardWork(packed, H200, *blocks, chunk_of(chosen.problem)).time(tile.step)

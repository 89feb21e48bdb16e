"""How keys of few queries are divided: the chunks that are tried, and the one that is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cuflash.features.packed_group import with_packed_group
from cuflash.planning.fa2_few import _chunks
from cuflash.planning.fa2_few_time import FewWork
from cuflash.planning.invariant import batch_invariant_plan
from cuflash.planning.key_chunks import chunk_of
from cuflash.planning.plan import Plan, plan
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles.fa2_few import Fa2FewTile, few_tiles

from ..architectures import LIMITS
from .test_forward_time import few

H200 = LIMITS["90"]


def _tile(problem: AttentionProblem) -> Fa2FewTile:
    return few_tiles(problem, H200)[0]


def _tiles(problem: AttentionProblem) -> tuple[Fa2FewTile, ...]:
    return few_tiles(with_packed_group(problem), H200)


def _time(problem: AttentionProblem, chunk: int = 0, merges: bool = False) -> float:
    packed = with_packed_group(problem)
    return FewWork(packed, H200, _tile(packed), chunk, merges).time


def _tried(keys: int) -> list[int]:
    problem = few(1, (1, 1), (1, keys))
    return _chunks(problem, _tile(problem))


def test_chunks_that_are_tried_are_powers_of_two_and_at_most_64() -> None:
    assert _tried(1) == _tried(64) == [0]
    assert _tried(65) == _tried(128) == [0, 64]
    assert _tried(129) == [0, 64, 128]
    assert _tried(64 * 64) == [0, 64, 128, 256, 512, 1024, 2048]
    assert _tried(64 * 64 + 1) == [0, 128, 256, 512, 1024, 2048, 4096]
    assert _tried(2**28) == [0, 2**20]
    assert _tried(0) == [0]


@pytest.mark.parametrize("chunk", [0, 256])
@pytest.mark.parametrize(
    ("group", "queries", "keys"),
    [(1, 16, 300), (8, 3, 300), (12, 5, 1000), (16, 16, 1000), (3, 16, 1000)],
)
def test_a_time_is_of_the_blocks_that_are_launched(
    group: int, queries: int, keys: int, chunk: int
) -> None:
    problem = few(3, (2 * group, 2), (queries, keys))
    chosen = plan(problem, H200, kv_chunk=chunk)
    work = FewWork(problem, H200, _tile(problem), chunk)
    chunks = -(-keys // chunk) if chunk else 1
    assert chosen.launches[0].grid == work._tiles * chunks
    # As many whole rounds take at least as long as the memory needs for the bytes.
    assert work.time > chosen.launches[0].grid * 4 * 128 * min(chunk or keys, keys) / 5e6


@pytest.mark.parametrize("chunk", [0, 128])
def test_keys_that_no_query_sees_take_no_time(chunk: int) -> None:
    seen = _time(few(1, (8, 8), (1, 1000)), chunk)
    for hidden in (
        {"mask": "causal", "q_offset": 999},
        {"mask": "left", "q_first": 99_000},
        {"mask": "band", "q_first": 500, "q_offset": 1499},
    ):
        assert _time(few(1, (8, 8), (1, 100_000), **hidden), chunk) == seen
    drafted = few(1, (8, 2), (8, 1000), mask="causal", q_offset=992)
    assert _time(drafted, chunk) == _time(few(1, (8, 2), (8, 1000)), chunk)


def test_a_time_is_of_the_bytes_of_keys_and_values() -> None:
    wide, narrow = few(200, (8, 2), (1, 8192)), few(200, (8, 2), (1, 8192), 64)
    mixed = [replace(wide, head_dim=64), replace(wide, head_dim_v=64)]
    assert _time(mixed[0]) == _time(mixed[1])
    assert 1.9 * _time(mixed[0]) < _time(wide) + _time(narrow) < 2.1 * _time(mixed[0])
    assert _time(mixed[0], 64) > 1.02 * _time(mixed[1], 64)  # partial outputs are of values


def test_the_last_chunk_counts_like_the_others() -> None:
    """A short one has a block, and a merge, too; one chunk is no longer than all keys."""
    alone = few(1, (1, 1), (1, 1000))
    assert _time(alone, 4096) == _time(alone, 1000)
    work = few(132, (1, 1), (1, 1025))
    assert _time(work, 1024) > _time(replace(work, seqlen_kv=1024), 1024) + 2


#: Bytes of the keys and values of 8192 keys, and microseconds of the launch.
_BYTES, _LAUNCH = 2 * 2 * 128 * 8192, 5.7


def test_a_round_takes_as_long_as_the_memory_or_as_one_block_alone() -> None:
    times = [_time(few(blocks, (1, 1), (1, 8192))) for blocks in range(1, 133)]
    alone = _LAUNCH + 0.5 + _BYTES / 0.078e6
    for blocks, time in enumerate(times, 1):
        assert time == pytest.approx(max(alone, _LAUNCH + blocks * _BYTES / 4.44e6))


def test_a_last_round_hides_a_part_of_what_a_block_needs_alone() -> None:
    """The more rounds came before, and the more blocks it has, the larger the part."""
    alone = 0.5 + _BYTES / 0.078e6
    for rounds, others in ((1, 1), (1, 66), (1, 131), (2, 66), (5, 1)):
        blocks = rounds * 132 + others
        memory = blocks * _BYTES / 4.44e6
        shown = (1 - others / 132) * alone / (1 + rounds)
        waits = 2.3 * rounds**0.5
        time = _time(few(blocks, (1, 1), (1, 8192)))
        assert time == pytest.approx(_LAUNCH + memory + shown + waits)
    full = _time(few(264, (1, 1), (1, 8192)))
    assert full == pytest.approx(_LAUNCH + 264 * _BYTES / 4.44e6 + 2.3)


def test_blocks_that_merge_chunks_take_time_for_each_of_them() -> None:
    """By the rows and columns of their results."""
    whole, heads = few(1, (1, 1), (1, 8192)), few(1, (8, 1), (2, 8192))
    assert _time(whole, 1024, True) - _time(whole) == pytest.approx(8 * (0.65 + 8 * 0.116))
    assert _time(heads, 512, True) - _time(heads) == pytest.approx(16 * (0.65 + 16 * 0.116))
    narrow = replace(whole, head_dim_v=64)
    assert _time(narrow, 1024, True) - _time(narrow) == pytest.approx(8 * (0.65 + 4 * 0.116))
    float8 = replace(whole, float8=True)
    assert _time(float8, 1024, True) - _time(float8) == pytest.approx(8 * 8 * 0.09)


def test_blocks_that_share_keys_read_them_once_in_one_round() -> None:
    """In several rounds they read them from L2, each for itself."""
    drafted = few(8, (32, 8), (8, 8192))
    wide, narrow = _tiles(drafted)
    assert (wide.rows, narrow.rows) == (32, 16)
    one = FewWork(drafted, H200, narrow, 0)
    assert one.blocks == 128
    rows = 0.07 * 12
    assert one.time == pytest.approx(_LAUNCH + 64 * _BYTES / 4.44e6 + rows)
    assert FewWork(drafted, H200, wide, 0).time == pytest.approx(
        _LAUNCH + 0.5 + _BYTES / (0.7 * 0.078e6) + 0.07 * 28
    )
    several = FewWork(replace(drafted, batch=33), H200, narrow, 0)
    assert several.blocks == 528
    further = 2 * rows * 2 + 2.3 * 3**0.5
    assert several.time == pytest.approx(_LAUNCH + 528 * _BYTES / 7.5e6 + further)


def test_a_block_takes_time_for_the_rows_that_it_has() -> None:
    """Those of eight drafted tokens of four heads take 3 to 6 us more than four rows."""
    one, eight = (_time(few(1, (32, 8), (queries, 32768)), 2048) for queries in (1, 8))
    assert 3 < eight - one < 6
    shared = few(8, (16, 1), (2, 4096)), few(1, (16, 1), (16, 4096))  # 8 blocks of 32 rows
    assert _time(shared[0]) == _time(shared[1])


def test_nothing_to_read_is_planned() -> None:
    for problem in (
        few(0, (8, 2), (1, 1000)),
        few(1, (0, 2), (1, 1000)),
        few(1, (8, 2), (1, 0)),
        few(1, (8, 2), (0, 1000)),
    ):
        chosen = plan(problem, H200, algorithm="fa2")
        assert isinstance(chosen.tile, Fa2FewTile)
        assert chunk_of(chosen.problem) == 0
        for chunk in (None, 0, 64):
            chosen = batch_invariant_plan(problem, H200, algorithm="fa2", kv_chunk=chunk)
            assert chosen.problem.has_pairs is False
            assert chosen.tile.chunk == 0


def _ratios(problem: AttentionProblem, batch: int, chunks: list[int]) -> dict[int, float]:
    """By chunk: the predicted time of its batch-invariant plan, for the shortest."""
    plans = (batch_invariant_plan(replace(problem, batch=batch), H200, kv_chunk=c) for c in chunks)
    times = {chunk: _of_plan(made) for chunk, made in zip(chunks, plans, strict=True)}
    return {chunk: time / min(times.values()) for chunk, time in times.items()}


def _of_plan(chosen: Plan) -> float:
    tile = chosen.tile
    assert isinstance(tile, Fa2FewTile)
    chunk = chunk_of(chosen.problem) or tile.chunk
    packed = with_packed_group(chosen.problem)
    return FewWork(packed, H200, tile, chunk, merges=tile.chunk > 0).time


#: Problems for which a rule that sums other powers, takes the worst batch, leaves one out or
#: merges where results have no room takes another chunk.
_STEADY = {
    "64 heads on 8": (few(1, (64, 8), (1, 1024)), 256),
    "16 heads on 1": (few(1, (16, 1), (1, 2048)), None),
    "wide, drafted": (few(1, (64, 8), (8, 2048), 256), None),
    "drafted, short, 4 heads on 1": (few(1, (4, 1), (8, 1024)), None),
    "wide, drafted, short": (few(1, (16, 2), (8, 1024), 256), None),
    "wide, 32768 keys": (few(1, (32, 8), (1, 32768), 256), None),
    "4096 keys": (few(1, (64, 8), (1, 4096)), 512),
    "8192 keys": (few(1, (32, 8), (1, 8192)), 1024),
    "131072 keys": (few(1, (32, 8), (1, 131072)), 16384),
}


@pytest.mark.parametrize("name", _STEADY)
def test_the_chunk_for_all_batches_has_the_least_sum_of_squared_ratios(name: str) -> None:
    """Ratios are of the plans that are made; the named chunks have been timed."""
    problem, timed = _STEADY[name]
    chosen = batch_invariant_plan(problem, H200)
    taken = chunk_of(chosen.problem) or chosen.tile.chunk
    packed = with_packed_group(problem)
    chunks = _chunks(packed, _tile(packed))
    ratios = [_ratios(problem, batch, chunks) for batch in (1, 1, 2, 4, 8, 16, 32, 64, 128)]
    sums = {chunk: sum(of[chunk] ** 2 for of in ratios) for chunk in chunks}
    assert sums[taken] == min(sums.values())
    assert timed in (None, taken)


def test_one_entry_has_the_chunk_with_the_shortest_time() -> None:
    for problem in (few(1, (32, 8), (1, 8192)), few(17, (32, 8), (1, 8192))):
        chosen = plan(problem, H200)
        packed = with_packed_group(problem)
        times = {chunk: _time(problem, chunk) for chunk in _chunks(packed, _tile(packed))}
        assert times[chunk_of(chosen.problem)] == min(times.values())

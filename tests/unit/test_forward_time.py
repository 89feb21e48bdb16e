"""Forward passes with few tiles take the tile and the chunk with the shortest predicted time."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from cuflash.planning.fa3_choice import _ways
from cuflash.planning.forward_time import ForwardWork, chunks_to_try, is_small
from cuflash.planning.key_chunks import chunk_of
from cuflash.planning.plan import Plan, plan
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.step_time import StepTime
from cuflash.planning.tiles import fa3
from cuflash.planning.tiles.fa3_tables import FORWARD, FORWARD_OF_FEW

from ..architectures import LIMITS
from .test_plan_fa3 import filling, mapped, planned

H200 = LIMITS["90"]


def few(
    batch: int, heads: tuple[int, int], lengths: tuple[int, int], width: int = 128, **more: Any
) -> AttentionProblem:
    """A problem with few tiles, in bfloat16 and by default without a mask."""
    of = {"batch": batch, "heads_q": heads[0], "heads_kv": heads[1], "width": width}
    of |= {"seqlen_q": lengths[0], "seqlen_kv": lengths[1], "storage": "bfloat16", "mask": "full"}
    return mapped(**{**of, **more})


def _taken(chosen: Plan) -> tuple[tuple[int, int], int]:
    return (chosen.tile.block_q, chosen.tile.block_kv), chunk_of(chosen.problem)


#: A problem, and the tiles (None: any) and keys of a chunk (0: not split) that were the fastest
#: on an H200.
_MEASURED = {
    "one query on 131072 keys": (
        few(1, (32, 8), (1, 131072)),
        {(64, 64)},
        {2048, 4096, 8192},
    ),
    "64 queries on 8192 keys each": (few(64, (32, 8), (1, 8192)), {(64, 64)}, {0, 1024}),
    "16 queries on 8192 keys each": (few(16, (32, 8), (1, 8192)), None, {0}),
    "one query on 8192 keys": (few(1, (32, 8), (1, 8192)), None, {512}),
    "one query on 1024 keys": (few(1, (64, 8), (1, 1024)), None, {128}),
    "a causal head of 16384": (
        few(1, (1, 1), (16384, 16384), mask="causal"),
        {(128, 128)},
        {8192},
    ),
    "a causal head of 4096": (few(1, (1, 1), (4096, 4096), mask="causal"), {(128, 128)}, {1024}),
    "77 queries on 4096 keys, narrow": (few(16, (8, 8), (77, 4096), 64), {(64, 128)}, {0}),
    "77 queries on 4096 keys": (few(16, (8, 8), (77, 4096)), {(64, 64)}, {0}),
}


@pytest.mark.parametrize("name", _MEASURED)
def test_what_was_measured_to_be_fastest_is_taken(name: str) -> None:
    problem, tiles, chunks = _MEASURED[name]
    tile, chunk = _taken(planned(problem))
    assert tiles is None or tile in tiles
    assert chunk in chunks
    assert planned(problem).reason == "the fastest for so few tiles"


def test_whoever_fills_the_device_has_the_first_row_of_the_table() -> None:
    """With two tiles for each multiprocessor, and enough rows, no time is predicted."""
    for width, mask, keys in product(
        (64, 96, 128, 192, 256), ("full", "causal"), (300, 1500, 9000)
    ):
        problem = filling(width=width, mask=mask, seqlen_kv=keys, batch=300)
        first = next(iter(fa3.candidates(problem, H200)))
        chosen = planned(problem)
        assert chosen.tile == first
        assert chunk_of(chosen.problem) == 0
        assert chosen.reason == "the first of the table for these lengths"
        assert [launch.config.kernel for launch in chosen.launches] == ["forward"]


def test_few_tiles_or_few_rows_are_small() -> None:
    problem = few(1, (1, 1), (1000, 1000))
    assert is_small(problem, 2 * 132 - 1, H200)
    assert not is_small(problem, 2 * 132, H200)
    assert is_small(replace(problem, seqlen_q=128), 10**6, H200)
    assert not is_small(replace(problem, seqlen_q=129), 10**6, H200)
    for nothing in ({"batch": 0}, {"seqlen_q": 0}, {"heads_q": 0, "heads_kv": 0}):
        assert not is_small(replace(problem, **nothing), 0, H200)


def test_chunks_that_are_tried_are_shorter_than_the_keys_and_not_too_many() -> None:
    assert chunks_to_try(few(1, (1, 1), (1, 100))) == [0]
    assert chunks_to_try(few(1, (1, 1), (1, 128))) == [0]
    assert chunks_to_try(few(1, (1, 1), (1, 129))) == [0, 128]
    for keys in (1000, 10**5, 2**20, 2**28):
        chunks = chunks_to_try(few(1, (1, 1), (1, keys)))
        assert chunks[0] == 0
        assert all(chunk < keys <= 64 * chunk for chunk in chunks[1:])


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("rows", [1, 77, 300, None], ids=str)
def test_more_keys_take_no_less_time(mask: str, rows: int | None) -> None:
    """Without chunks the time never falls; the shortest of all choices falls by 7 % at most."""
    step, last, shortest = StepTime(1.0, 1.5), [0.0] * 3, 0.0
    for keys in range(64, 20000, 500):
        problem = few(1, (4, 4), (rows or keys, keys), mask=mask, q_offset=keys - (rows or keys))
        for i, tile in enumerate(((64, 64, 3), (64, 128, 2), (192, 80, 1))):
            now = ForwardWork(problem, H200, *tile, 0).time(step)
            assert now >= last[i], (keys, tile)
            last[i] = now
        times = [time for time, _ in _ways(problem, H200, None)]
        assert min(times, default=shortest) >= 0.93 * shortest, keys
        shortest = min(times, default=shortest)


def test_more_entries_take_no_less_time() -> None:
    step, last = StepTime(0.67, 0.92), 0.0
    for batch in range(1, 200):
        work = ForwardWork(few(batch, (8, 8), (64, 4096)), H200, 64, 64, 2, 0)
        now = work.time(step)
        assert now > last - 0.25 * now  # the time may fall where a round is full
        last = now


def test_items_are_those_that_blocks_walk() -> None:
    """The items agree with a count over every tile and chunk."""
    for mask, rows, keys, chunk in product(
        ("full", "causal", "left", "band"), (1, 100, 333), (90, 128, 1000), (0, 128, 256)
    ):
        problem = few(1, (1, 1), (rows, keys), mask=mask)
        last = keys - rows if problem.has_last else 0
        problem = replace(problem, q_offset=last, q_first=-40 if problem.has_first else 0)
        items = []
        for q_begin in range(0, rows, 64):
            begin, end = problem.visibility.keys_seen(q_begin, min(q_begin + 64, rows))
            for at in range(0, keys, chunk or keys):
                there = min(end, at + (chunk or keys)) - max(begin, at)
                items += [-(-there // 64)] if there > 0 else []
        found = ForwardWork(problem, H200, 64, 64, 1, chunk)._items()
        assert found.number == len(items), (mask, rows, keys, chunk)
        assert (found.steps, found.longest) == (sum(items), max(items, default=0))
        assert found.equal == (len(set(items)) <= 1)


def test_a_plan_is_pure_and_takes_no_time() -> None:
    """Planning takes at most 50 ms, even with the most q tiles of a problem with few tiles."""
    for heads, rows, mask in ((1, 60000, "causal"), (1, 16384, "band"), (8, 128, "full")):
        problem = few(1, (heads, heads), (rows, 131072), 64, mask=mask)
        problem = replace(problem, q_first=-900 if mask == "band" else 0, q_offset=131072 - rows)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            chosen = plan(problem, H200)
            times.append(time.perf_counter() - start)
            assert chosen == plan(problem, H200)
        assert min(times) <= 0.05


def test_only_tiles_whose_steps_are_measured_are_reckoned_with() -> None:
    """Steps are measured in heads of about a tile's width; tiles of wider heads are not taken."""
    for width, others in ((64, {(128, 64), (192, 80)}), (128, {(128, 96)})):
        for batch, rows, keys in product((1, 3, 9, 30), (1, 70, 500), (100, 1000, 9000)):
            tile, _ = _taken(planned(few(batch, (2, 2), (rows, keys), width)))
            assert tile not in others
    every = (*FORWARD, *FORWARD_OF_FEW)
    assert all(row.step > 0 for row in every)
    assert all(row.step_beside > row.step for row in every if row.blocks_per_sm > 1)


def test_a_step_beside_others_takes_longer() -> None:
    step = StepTime(0.5, 0.9)
    assert step.among(1, 3) == 0.5
    assert step.among(2, 3) == pytest.approx(0.7)
    assert step.among(3, 3) == step.among(9, 3) == pytest.approx(0.9)
    assert step.among(1, 1) == 0.5

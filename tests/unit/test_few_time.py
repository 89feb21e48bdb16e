"""Predicted times of few queries against times that were measured on an H200.

``bench/NOTES.md`` ("Few queries: warps that divide the keys") says how well they agree.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest

from bench.stored import Row, gpu_rows, of_set, problem
from cuflash.features.packed_group import with_packed_group
from cuflash.planning.fa2_few_time import FewWork
from cuflash.planning.invariant import batch_invariant_plan
from cuflash.planning.key_chunks import chunk_of
from cuflash.planning.plan import plan
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles.fa2_few import Fa2FewTile, few_tiles

from ..architectures import LIMITS
from .test_forward_time import few

H200 = LIMITS["90"]
#: Keys of a chunk, 0 without chunks, and whether a block merges them.
Way = tuple[int, bool]


def _predicted(asked: AttentionProblem, way: Way, rows: int = 16) -> float:
    packed = with_packed_group(asked)
    (tile,) = (tile for tile in few_tiles(packed, H200) if tile.rows == rows)
    return FewWork(packed, H200, tile, *way).time


def _problem(row: Row) -> AttentionProblem:
    heads, lengths = (row["heads_q"], row["heads_kv"]), (row["seqlen_q"], row["seqlen_kv"])
    plain = few(row["batch"], heads, lengths, row["head_dim"], storage=row["dtype"])
    return replace(plain, float8=bool(row["options"].get("float8")))


def _way(row: Row) -> Way:
    """How the stored call divided its keys."""
    if "chunks of" not in row["plan"]:
        return 0, False
    return int(row["plan"].split()[-1]), "merging" in row["plan"]


def _rows(name: str, **options: Any) -> list[Row]:
    """The stored rows of a set, of calls with these options."""
    ours = [row for row in of_set(name, gpu_rows()) if row["impl"] == "cuflash"]
    return [row for row in ours if options.items() <= row["options"].items()]


def _errors(rows: list[Row]) -> dict[tuple[bool, int, int], float]:
    """By call, entries and keys: how much longer, in parts of it, a predicted time is."""
    named = ((bool(row["options"].get("kvcache")), row["batch"], row["seqlen_kv"]) for row in rows)
    times = (_predicted(_problem(row), _way(row)) / (1000 * row["ms"]) for row in rows)
    return {name: time - 1 for name, time in zip(named, times, strict=True)}


def _check(errors: dict[tuple[bool, int, int], float], most: float, others: Any) -> None:
    """No error is larger than ``most``, but for ``others``, whose errors are known to 1 %."""
    far = {name: error for name, error in errors.items() if abs(error) > most}
    assert far == pytest.approx(others, abs=0.01)


def test_times_of_all_batches_are_predicted() -> None:
    rows = _rows("batches")
    assert len(rows) == 80
    others = {(True, 1, 8192): -0.066, (True, 5, 8192): -0.075, (True, 7, 8192): -0.069}
    _check(_errors(rows), 0.065, others)


def test_a_chunk_that_a_block_merges_takes_a_microsecond_and_a_half() -> None:
    """Of nine sequences each block merges eight, and what it needs alone is the longest."""
    (row,) = (row for row in _rows("batches", kvcache=True) if row["batch"] == 9)
    assert _way(row) == (1024, True)
    assert _predicted(_problem(row), _way(row)) == pytest.approx(1000 * row["ms"], rel=0.02)


def test_times_of_decoding_are_predicted() -> None:
    rows = _rows("decode")
    assert len(rows) == 20
    others = {(True, 1, 1024): 0.064}
    _check(_errors(rows), 0.06, others)


def test_times_of_float8_caches_are_predicted() -> None:
    rows = _rows("decode-float8", float8=True)
    assert len(rows) == 10
    others = {(True, 4, 16384): -0.205, (True, 8, 8192): -0.127, (True, 32, 1000): -0.073}
    _check(_errors(rows), 0.07, others)


def test_of_two_ways_that_were_timed_in_turns_the_faster_one_is_predicted() -> None:
    """Both calls of a problem had other chunks, and times at least 5 % apart."""
    seen = 0
    for name in ("decode", "batches"):
        for _, pair in groupby(_rows(name), key=lambda row: problem(row)[:10]):
            one, other = sorted(pair, key=lambda row: row["ms"])
            if _way(one) == _way(other) or other["ms"] < 1.05 * one["ms"]:
                continue
            seen += 1
            assert _predicted(_problem(one), _way(one)) < _predicted(_problem(other), _way(other))
    assert seen >= 8


def _chosen(asked: AttentionProblem, kvcache: bool) -> tuple[Fa2FewTile, Way]:
    made = (batch_invariant_plan if kvcache else plan)(asked, H200)
    assert isinstance(made.tile, Fa2FewTile)
    return made.tile, (chunk_of(made.problem) or made.tile.chunk, made.tile.chunk > 0)


def test_the_ways_that_were_timed_are_taken() -> None:
    for row in (*_rows("batches"), *_rows("decode"), *_rows("decode-float8", float8=True)):
        _, chosen = _chosen(_problem(row), bool(row["options"].get("kvcache")))
        assert chosen == _way(row), row


_LAST = {"mask": "causal", "q_offset": 32768 - 8}


def test_times_of_drafts_are_predicted() -> None:
    """Eight queries of four heads are two blocks of 16 rows, which read the same keys."""
    for row in _rows("drafts"):
        several = row["seqlen_q"] > 1
        asked = replace(_problem(row), **(_LAST if several else {}))
        tile, way = _chosen(asked, bool(row["options"].get("kvcache")))
        assert (tile.rows, way) == (16, _way(row))
        assert _predicted(asked, way) == pytest.approx(1000 * row["ms"], rel=0.05)


_DECODED, _ONE_HEAD = few(64, (32, 8), (1, 8192)), few(128, (16, 1), (1, 4096))
_DRAFTED = {batch: few(batch, (32, 8), (8, 32768), **_LAST) for batch in (1, 4, 8)}

#: Microseconds of single runs, by problem, way and rows of a block.
_SINGLE_RUNS: tuple[tuple[AttentionProblem, Way, int, float], ...] = (
    (_DECODED, (0, False), 16, 486),
    (_DECODED, (1024, True), 16, 488),
    (_DECODED, (1024, False), 16, 505),
    (_ONE_HEAD, (512, False), 16, 97),
    (replace(_ONE_HEAD, float8=True), (0, False), 16, 39),
    (replace(_ONE_HEAD, float8=True), (512, True), 16, 49),
    (few(16, (32, 8), (1, 8192)), (2048, False), 16, 132),
    (few(17, (32, 8), (1, 8192)), (0, False), 16, 158),
    (few(25, (32, 8), (1, 8192)), (0, False), 16, 205),
    (few(8, (32, 8), (1, 32768)), (16384, False), 16, 244),
    (few(8, (32, 8), (1, 32768)), (4096, True), 16, 245),
    (few(4, (32, 8), (1, 32768)), (0, False), 16, 225),
    (few(4, (32, 8), (1, 16384), 64), (1024, True), 16, 78),
    (few(4, (32, 8), (1, 16384), 64), (4096, True), 16, 65),
    (few(8, (16, 2), (1, 8192), 256), (1024, False), 16, 41.3),
    (few(1, (64, 8), (1, 4096)), (256, False), 16, 13.0),
    (_DRAFTED[1], (1024, False), 16, 62.2),
    (_DRAFTED[1], (2048, False), 16, 50.0),
    (_DRAFTED[1], (1024, False), 32, 50.3),
    (_DRAFTED[1], (2048, False), 32, 42.7),
    (_DRAFTED[1], (4096, False), 32, 50.7),
    (_DRAFTED[1], (1024, True), 16, 287),
    (_DRAFTED[4], (16384, False), 16, 130),
    (_DRAFTED[4], (16384, False), 32, 162),
    (_DRAFTED[8], (4096, False), 16, 329),
    (_DRAFTED[8], (16384, False), 32, 252),
    (_DRAFTED[8], (4096, False), 32, 272),
    (_DRAFTED[8], (4096, True), 16, 251),
)


@pytest.mark.parametrize("run", range(len(_SINGLE_RUNS)))
def test_times_of_single_runs_are_predicted(run: int) -> None:
    asked, way, rows, measured = _SINGLE_RUNS[run]
    assert _predicted(asked, way, rows) == pytest.approx(measured, rel=0.08)

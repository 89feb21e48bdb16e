"""Float8 caches: the calls timed with them, the numbers that they hold, and the table."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from bench import measure as measuring
from bench.cases import Case, select
from bench.float8 import bytes_of, nearest
from bench.inputs import make_inputs, widened
from bench.measure import measure
from bench.peers import PEERS
from bench.sources import features_of
from bench.tables import render
from bench.verify import Truth

from .bench_rows import rows_of
from .test_bench_measure import _clock, _peer
from .test_bench_report import Store, stored

__all__ = ["stored"]

STORED = Case(
    *("forward", "float16", 2, 4, 2, 16, 16, 1, 48, False, "fa2"),
    kvcache=True,
    float8=True,
    rotated=True,
)
PLAIN = replace(STORED, float8=False)


@pytest.fixture(autouse=True)
def _small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The L2 cache has room for the keys and values of two of the tests' calls."""
    monkeypatch.setattr("bench.rotation.L2", 2 * STORED.key_bytes)


def test_caches_of_16_bits_take_turns() -> None:
    assert STORED.companions == [PLAIN]
    assert STORED.extras == ["kvcache", "float8"]
    assert STORED.options == {**PLAIN.options, "float8": True}
    assert 2 * STORED.key_bytes == PLAIN.key_bytes
    assert STORED.bytes - STORED.key_bytes == PLAIN.bytes - PLAIN.key_bytes
    assert [replace(case, float8=False) for case in select("decode-float8")] == select("decode")


def test_numbers_and_bytes_are_those_of_the_format() -> None:
    x = np.random.default_rng(3).standard_normal(10_000).astype(np.float32) * np.float32(20)
    x[:2000] /= 2000
    x[:5] = 0, 2.0**-10, 3 * 2.0**-10, -449, 448
    expected = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    found = nearest(x, np)
    assert np.array_equal(found, expected.astype(np.float32))
    assert np.array_equal(bytes_of(found, np), expected.view(np.uint8))


def test_both_hold_the_same_numbers_and_are_verified() -> None:
    inputs = make_inputs(STORED, np)
    own, plain = inputs.of(STORED), inputs.of(PLAIN)
    truth = Truth(STORED, own)
    for one, case in ((own, STORED), (plain, PLAIN)):
        assert 0 < truth.worst_ratio([PEERS["cuflash"].prepare(case, one)()]) < truth.limit
    for held, whole in zip(own.matrices(STORED)[1:3], (inputs.k, inputs.v), strict=True):
        assert held.dtype == np.uint8
        numbers = held.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        assert np.array_equal(numbers, widened(whole))
    assert own.stored is not None
    other = replace(own, stored=own.stored[::-1])
    assert truth.worst_ratio([PEERS["cuflash"].prepare(STORED, other)()]) > truth.limit


def test_it_is_compared_with_16_bits_and_with_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "digest_now", lambda algorithm, op, sources: str(sources))
    monkeypatch.setattr(measuring, "plan_of", lambda case, inputs: "fa3 64x64")
    names = {"cuflash fa2 kvcache float8": 3.0, "cuflash fa2 kvcache": 6.0}
    peer = _peer("quick", lambda case, inputs: inputs.q)
    rows = measure(STORED, [peer], ("turns",), make_inputs(STORED, np), print, _clock(names))
    assert [one["options"].get("float8") for one in rows] == [True, None]
    assert [one["ratio"] for one in rows] == [2.0, None]
    assert rows[0]["sources"] == "('used_lengths', 'split_keys', 'float8')"


def test_rows_say_whether_caches_are_float8() -> None:
    for one in rows_of("decode-float8"):
        float8 = bool(one["options"].get("float8"))
        assert features_of(one) == ("used_lengths", "split_keys") + ("float8",) * float8


def test_the_table_has_a_line_for_each_case(stored: Store) -> None:
    stored(*rows_of("decode-float8"))
    shown = render("decode-float8")
    lines = [line for line in shown.splitlines() if line.startswith("| 128 | 32/8 | 64 x 8192 |")]
    assert lines == ["| 128 | 32/8 | 64 x 8192 | 500 | 1000 | 0.50 | 0.40 |"]

"""Few queries on many keys: timed problems, their copies, counts of bytes, and the tables."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
from bench import measure as measuring
from bench.cases import Case, select
from bench.inputs import Inputs, make_inputs
from bench.lines import place, problems
from bench.measure import measure
from bench.peers import PEERS, select_peers
from bench.planned import plan_of
from bench.rotation import L2, copies_of, in_turn, number_of
from bench.run import _line
from bench.sources import digest, features_of
from bench.stored import kind, of_set
from bench.tables import render
from bench.verify import Truth
from cuflash.cuda.source import find_sources

from .bench_rows import row, rows_of
from .fake_torch import FakeTorch, fake_torch
from .test_bench import KEYS
from .test_bench_measure import _clock, _peer
from .test_bench_report import Store, stored

__all__ = ["fake_torch", "stored"]

CACHED = Case(
    *("forward", "float32", 2, 4, 2, 16, 16, 1, 40, False, "fa2"), kvcache=True, rotated=True
)


@pytest.fixture(autouse=True)
def _small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The L2 cache has room for the keys and values of two of the tests' calls."""
    monkeypatch.setattr("bench.rotation.L2", 2 * CACHED.key_bytes)


def test_copies_hold_three_times_what_the_cache_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.rotation.L2", L2)
    for case in select("decode,few"):
        pairs = case.batch * case.seqlen_kv * case.heads_kv * (case.head_dim + case.head_dim_v)
        assert case.key_bytes == 2 * pairs
        assert number_of(case) >= 2
        assert number_of(case) * 2 * pairs > 3 * 50 * 2**20
    counted = {(case.batch, case.seqlen_kv): number_of(case) for case in select("decode")}
    assert counted[1, 131072] == 2  # copies of 512 MiB each
    assert counted[1, 1024] == 45  # copies of 4 MiB each
    assert number_of(replace(CACHED, rotated=False)) == 1


def test_copies_hold_the_same_in_memory_of_their_own() -> None:
    for dtype in ("float32", "bfloat16"):
        case = replace(CACHED, dtype=dtype, seqlen_kv=24)
        inputs = make_inputs(case, np)
        copies = copies_of(case, inputs)
        assert copies[0] is inputs
        assert len(copies) == number_of(case) > 2
        places = {(one.k.ctypes.data, one.v.ctypes.data) for one in copies}
        assert len({place for pair in places for place in pair}) == 2 * len(copies)
        for one in copies:
            assert one.k.dtype == inputs.k.dtype
            assert one.k.tobytes() == inputs.k.tobytes()
            assert one.v.tobytes() == inputs.v.tobytes()
            assert one.q is inputs.q
    plain = replace(CACHED, rotated=False)
    assert copies_of(plain, inputs) == [inputs]


def test_calls_follow_one_another() -> None:
    seen: list[int] = []
    several = in_turn([lambda n=n: seen.append(n) for n in range(3)])  # type: ignore[misc]
    several()
    several()
    assert seen == [0, 1, 2, 0, 1, 2]


def test_bytes_are_of_each_array_once() -> None:
    case = replace(CACHED, dtype="bfloat16", head_dim_v=8)
    inputs = make_inputs(case, np)
    out = np.empty((2, 1, 4, 8), np.float16)
    arrays = (inputs.q, inputs.k, inputs.v, out)
    assert case.bytes == sum(array.nbytes for array in arrays)
    assert case.key_bytes == inputs.k.nbytes + inputs.v.nbytes
    assert replace(case, dtype="float32").bytes == 2 * case.bytes


def test_a_step_of_decoding_asks_for_a_cache_that_is_full() -> None:
    inputs = make_inputs(CACHED, np)
    asked = inputs.asked(CACHED)
    lengths = asked.pop("cache_seqlens")
    assert asked == {"causal": False, "algorithm": "fa2"}
    assert (lengths.dtype, lengths.tolist()) == (np.int32, [40, 40])
    (plain,) = CACHED.companions
    assert plain == replace(CACHED, kvcache=False)
    assert (CACHED.features, CACHED.extras, plain.extras) == ((), ["kvcache"], [])
    assert inputs.asked(plain) == asked
    assert plain.options == {"algorithm": "fa2", "rotated": True}
    assert CACHED.options == {**plain.options, "kvcache": True}
    assert CACHED.peer_options == {"rotated": True}
    assert str(CACHED) == "fa2 forward float32 2x1/40x4/2x16 full kvcache rotated"


def test_cases_have_few_queries_or_one_head() -> None:
    for case in select("decode"):
        assert (case.seqlen_q, case.causal, case.dtype) == (1, False, "bfloat16")
        assert case.kvcache
    for case in select("few"):
        assert case.companions == []
        assert case.seqlen_q < case.seqlen_kv or case.batch * case.heads_q == 1
    assert {case.head_dim for case in select("decode")} == {64, 128, 256}


def test_both_calls_are_verified_on_every_copy() -> None:
    inputs = make_inputs(CACHED, np)
    truth = Truth(CACHED, inputs)
    assert truth.limit == 10
    for case in (CACHED, CACHED.plain):
        for one in copies_of(case, inputs):
            found = PEERS["cuflash"].prepare(case, one)()
            assert 0 < truth.worst_ratio([found]) < 50
    shorter = replace(inputs, cache_seqlens=inputs.cache_seqlens - np.int32(1))
    assert truth.worst_ratio([PEERS["cuflash"].prepare(CACHED, shorter)()]) > truth.limit


def _measured(*names: str, **times: float) -> tuple[list[dict[str, Any]], Counter[int]]:
    """The rows of both calls and of the peers, and how often the peers read each copy."""
    read: Counter[int] = Counter()

    def call(case: Case, inputs: Inputs) -> Any:
        read[inputs.k.ctypes.data] += 1
        return cuflash.attention(inputs.q, inputs.k, inputs.v)

    clock = _clock({"cuflash fa2 kvcache": 12.0, "cuflash fa2": 6.0, **times})
    peers = [_peer(name, call) for name in names]
    inputs = make_inputs(CACHED, np)
    return measure(CACHED, peers, ("turns",), inputs, [].append, clock), read


def test_each_call_reads_another_copy_and_the_time_is_that_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measuring, "digest_now", lambda algorithm, op, sources: str(sources))
    rows, read = _measured("quick", quick=3.0)
    assert number_of(CACHED) == 6
    assert set(read.values()) == {1 + 22}  # one to verify, one to warm up, and 21 rounds
    assert len(read) == 6
    cached, plain, quick = rows
    assert [one["ms"] for one in rows] == [2.0, 1.0, 0.5]
    assert [one["ratio"] for one in rows] == [0.25, 0.5, 4.0]
    assert [one["sources"] for one in (cached, plain)] == [
        "('used_lengths', 'split_keys')",
        "('split_keys',)",
    ]
    assert plain["gb_per_s"] == round(CACHED.bytes / 1e6, 1)
    place = KEYS.index("tflops") + 1
    assert [*KEYS[:3], *quick] == [*KEYS[:place], "gb_per_s", *KEYS[place:]]
    assert "  4321 GB/s  error" in _line(CACHED.plain, {**plain, "gb_per_s": 4321.4})


def test_alone_neither_call_has_a_ratio() -> None:
    rows, _ = _measured()
    assert [(one["ratio"], one["ratio_low"]) for one in rows] == [(None, None)] * 2


def test_a_plan_says_its_chunk() -> None:
    inputs = make_inputs(CACHED, np)
    assert plan_of(CACHED, inputs) == plan_of(CACHED.plain, inputs)
    assert plan_of(CACHED, inputs).startswith("fa2 ")


def test_the_digest_has_what_a_plan_may_add() -> None:
    root = find_sources()
    for name in ("decode", "few"):
        for one in rows_of(name):
            assert ("split_keys" in features_of(one)) is True
            assert ("used_lengths" in features_of(one)) is bool(one["options"].get("kvcache"))
    every = ((), ("split_keys",), ("used_lengths", "split_keys"))
    assert len({digest(root, "fa3", "forward", sources) for sources in every}) == 3


def test_peers_that_take_few_queries(fake_torch: FakeTorch) -> None:
    for case in (*select("decode"), *select("few")):
        able = {peer.name for peer in select_peers("flash,cudnn,fa4") if peer.supports(case)}
        assert able == {"flash", "cudnn", "fa4"}
    for name in ("cudnn", "fa4"):
        (peer,) = select_peers(name)
        peer.prepare(replace(CACHED, dtype="float16"), make_inputs(CACHED, np))()
    asked = [of_call["options"] for _, of_call in fake_torch.calls]
    assert asked == [{"is_causal": False, "enable_gqa": True}, {"causal": False}]


def test_rows_of_other_copies_are_of_another_problem() -> None:
    (case, *_) = select("few")
    rows = [row(case, "cuflash", 1.0), row(replace(case, rotated=False), "cuflash", 2.0)]
    assert len(problems(rows)) == 2
    assert of_set("few", rows) == rows[:1]
    assert [kind(one) for one in rows] == ["few queries", ""]


def test_the_table_of_decoding_has_both_calls_beside_the_peers(stored: Store) -> None:
    rows = rows_of("decode", "torch flash", "torch cudnn")
    for one in rows:
        one["ratio"] = 0.8 if one["options"].get("kvcache") else 0.9
        one["gb_per_s"] = 1000.0 * len(one["options"])
    stored(*rows)
    text = render("decode")
    assert (
        "| head_dim | heads | batch x keys | `attention` | `attention_with_kvcache` | torch flash "
        "| torch cudnn | ratio to the best other | at least | with `cache_seqlens` | at least |"
    ) in text
    line = "| 128 | 32/8 | 1 x 131072 | 2000 | 3000 | 1000 | 1000 | 0.90 | 0.40 | 0.80 | 0.40 |"
    assert line in text
    assert "| 128 | 32 | 8 x 2048 |" in text
    assert "`attention` is 0.90 times as fast as the best other (geometric mean of 10)" in text
    assert "`attention_with_kvcache` is 0.80 times" in text
    assert text.startswith("NVIDIA Abacus, bfloat16, one query a sequence, GB/s")


def test_the_table_of_decoding_stands_without_peers(stored: Store) -> None:
    stored(*rows_of("decode", ratio=None, ratio_low=None))
    text = render("decode")
    assert "Nothing else was timed." in text
    assert text.count("|  |  |  |  |") == len(select("decode"))


def test_the_table_of_few_queries_has_both_lengths(stored: Store) -> None:
    stored(*rows_of("few", "torch cudnn"))
    text = render("few")
    assert "| 64 | 128 | 77/4096 | full | 100 | 200 | 0.50 | 0.40 |" in text
    assert "| 128 | 1 | 16384 | causal | 100 |" in text
    assert "**Few queries**: cuflash fa3 is 0.50 times" in text
    assert "docs/charts" not in text
    assert place(row(select("few")[2], "cuflash", 1.0))[2] == "1024/8192"

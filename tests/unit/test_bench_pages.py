"""Caches in pages: the calls timed with them, equal keys, and the table."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import measure as measuring
from bench.cases import Case, select
from bench.inputs import Inputs, make_inputs
from bench.measure import measure
from bench.peers import PEERS
from bench.planned import plan_of
from bench.rotation import copies_of, number_of
from bench.sources import digest, features_of
from bench.stored import label, of_set
from bench.tables import render
from bench.verify import Truth
from cuflash.arrays.adopt import adopt
from cuflash.cuda.source import find_sources

from ..architectures import LIMITS
from .bench_rows import rows_of
from .test_bench_measure import _clock, _peer
from .test_bench_report import Store, stored

__all__ = ["stored"]

PAGED = Case(
    *("forward", "float32", 2, 4, 2, 16, 16, 1, 48, False, "fa2"),
    kvcache=True,
    pages=(16, 8),
    rotated=True,
)
SMALLER, PLAIN = replace(PAGED, pages=(8,)), replace(PAGED, pages=())


@pytest.fixture(autouse=True)
def _small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The L2 cache has room for the keys and values of two of the tests' calls."""
    monkeypatch.setattr("bench.rotation.L2", 2 * PAGED.key_bytes)


def test_sizes_of_pages_and_one_piece_take_turns() -> None:
    assert PAGED.companions == [SMALLER, PLAIN]
    assert SMALLER.companions == [SMALLER.plain] == [PLAIN]
    assert PAGED.extras == ["kvcache", "pages of 16"]
    assert PLAIN.extras == ["kvcache"]
    assert PAGED.options == {**PLAIN.options, "page_size": 16}
    assert PAGED.peer_options == {"rotated": True}
    assert str(PAGED) == "fa2 forward float32 2x1/48x4/2x16 full pages of 16, 8 kvcache rotated"
    for case in select("pages"):
        assert (case.pages, case.seqlen_q, case.dtype) == ((64, 16), 1, "bfloat16")
        assert {case.seqlen_kv % size for size in case.pages} == {0}
        assert case.kvcache
        assert case.rotated


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [PAGED, SMALLER])
def test_pages_hold_the_same_keys_in_an_order_that_is_drawn(case: Case, dtype: str) -> None:
    case = replace(case, dtype=dtype)
    inputs = make_inputs(case, np)
    assert inputs.paged is None
    own, size = inputs.of(case), case.pages[0]
    assert own.paged is not None
    k, v, table = own.paged
    assert (table.dtype, table.shape) == (np.int32, (2, 48 // size))
    assert sorted(table.ravel()) == list(range(96 // size))
    assert any(a > b for a, b in pairwise(table.ravel()))
    assert set(table[0]) != set(range(len(table[0])))  # the entries' pages are mixed
    for pool, whole in ((k, inputs.k), (v, inputs.v)):
        assert pool.shape == (96 // size, size, 2, 16)
        assert pool.dtype == whole.dtype
        assert pool[table].reshape(whole.shape).tobytes() == whole.tobytes()
    again = inputs.of(case).paged
    assert again is not None
    assert np.array_equal(again.table, table)
    assert own.of(replace(PLAIN, dtype=dtype)).paged is None


def test_the_call_is_given_pages_and_their_table() -> None:
    inputs = make_inputs(PAGED, np)
    own, plain = inputs.of(PAGED), inputs.of(PLAIN)
    assert own.paged is not None
    asked = own.asked(PAGED)
    assert asked.pop("page_table") is own.paged.table
    assert asked.pop("cache_seqlens") is inputs.cache_seqlens
    assert asked == {"causal": False, "algorithm": "fa2"}
    assert own.matrices(PAGED)[1:3] == [own.paged.k, own.paged.v]
    assert "page_table" not in plain.asked(PLAIN)
    assert plain.matrices(PLAIN)[1].shape == (2, 48, 2, 16)


def _worst(truth: Truth, case: Case, own: Inputs) -> float:
    return truth.worst_ratio([PEERS["cuflash"].prepare(case, own)()])


def test_pages_are_verified_on_every_copy_and_a_wrong_page_shows() -> None:
    inputs = make_inputs(PAGED, np)
    truth = Truth(PAGED, inputs.of(PAGED))
    for case in (PAGED, *PAGED.companions):
        every = [one.of(case) for one in copies_of(case, inputs)]
        assert len(every) == number_of(case) > 2
        assert len({own.matrices(case)[1].ctypes.data for own in every}) == len(every)
        for own in every:
            assert 0 < _worst(truth, case, own) < truth.limit
            if own.paged is not None:
                other = own.paged._replace(table=own.paged.table[::-1].copy())
                assert _worst(truth, case, replace(own, paged=other)) > truth.limit


def test_each_size_is_compared_with_one_piece_and_with_no_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measuring, "digest_now", lambda algorithm, op, sources: str(sources))
    names = ("kvcache pages of 16", "kvcache pages of 8", "kvcache")
    milliseconds = (12.0, 24.0, 6.0)  # times of six copies
    clock = _clock({f"cuflash fa2 {n}": ms for n, ms in zip(names, milliseconds, strict=True)})
    peer = _peer("quick", lambda case, inputs: inputs.q)
    rows = measure(PAGED, [peer], ("turns",), make_inputs(PAGED, np), print, clock)
    assert [one["options"].get("page_size") for one in rows] == [16, 8, None]
    assert [one["ratio"] for one in rows] == [0.5, 0.25, None]
    assert [one["ms"] for one in rows] == [2.0, 4.0, 1.0]
    paged = "('used_lengths', 'split_keys', 'cached_keys')"
    assert [one["sources"] for one in rows] == [paged, paged, "('used_lengths', 'split_keys')"]
    assert {one["gb_per_s"] * one["ms"] for one in rows} == {round(PAGED.bytes / 1e6, 1)}


@pytest.fixture
def _on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy arrays are planned for as if they were on an H200."""

    def described(name: str, array: Any) -> Any:
        return SimpleNamespace(spec=replace(adopt(name, array).spec, device=0))

    monkeypatch.setattr("cuflash.arrays.adopt.adopt", described)
    monkeypatch.setattr("cuflash.pipeline.DeviceLimits.query", lambda device: LIMITS["90"])


@pytest.mark.usefixtures("_on_an_h200")
def test_pages_have_the_plan_of_one_piece() -> None:
    for case in select("pages"):
        case = replace(case, batch=1, seqlen_kv=2048)
        inputs = make_inputs(case, np)
        plans = {plan_of(one, inputs) for one in (case, *case.companions)}
        assert len(plans) == 1
        assert " chunks of " in plans.pop()


def test_rows_say_whether_keys_lie_in_pages() -> None:
    for one in rows_of("pages"):
        paged = bool(one["options"].get("page_size"))
        assert features_of(one) == ("used_lengths", "split_keys") + ("cached_keys",) * paged
    assert [features_of({"options": c.options}) for c in (PAGED, PLAIN)] == [
        PAGED.sources,
        PLAIN.sources,
    ]


def test_the_digest_has_what_finds_pages(tmp_path: Path) -> None:
    root = tmp_path / "cuda_src"
    shutil.copytree(find_sources(), root)
    before = [digest(root, "fa3", "forward", case.sources) for case in (PAGED, PLAIN)]
    header = root / "features" / "cached_keys.cuh"
    header.write_text(header.read_text() + "\nstruct Another {};\n")
    after = [digest(root, "fa3", "forward", case.sources) for case in (PAGED, PLAIN)]
    assert after[0] != before[0] != before[1] == after[1]


def test_the_table_has_a_line_for_each_case(stored: Store) -> None:
    rows = rows_of("pages")
    for one in rows:
        size = one["options"].get("page_size")
        one["ratio"] = {64: 0.98, 16: 0.9}.get(size)
        one["gb_per_s"] = {64: 3920.0, 16: 3600.4}.get(size, 4000.0)
    stored(*rows)
    lines = render("pages").splitlines()
    assert lines[0].startswith("NVIDIA Abacus, bfloat16, `attention_with_kvcache`, one query")
    first = ["head_dim", "heads", "batch x keys", "in one piece"]
    sizes = [f"pages of {n} | of the speed in one piece" for n in (64, 16)]
    assert lines[2] == f"| {' | '.join([*first, *sizes])} |"
    assert lines[4] == "| 128 | 32/8 | 64 x 8192 | 4000 | 3920 | 0.980 | 3600 | 0.900 |"
    assert len(lines) == 4 + 4
    stored(*(one for one in rows if one["options"].get("page_size") != 16))
    assert render("pages") == ""  # a line needs all sizes of its case


def test_a_run_of_both_sets_has_either_table(stored: Store) -> None:
    """Both sets have calls for caches in one piece; rows of pages do not change the other table."""
    decoded, paged = rows_of("decode", "torch flash"), rows_of("pages", ratio=None)
    stored(*decoded)
    alone = render("decode")
    stored(*decoded, *paged)
    assert render("decode") == alone
    assert render("pages").count("\n") == 4 + 4
    assert len(of_set("pages", paged)) == 3 * 4
    assert [label(one) for one in paged[:3]] == [
        "cuflash fa2, kvcache, pages of 64",
        "cuflash fa2, kvcache, pages of 16",
        "cuflash fa2, kvcache",
    ]
    other = {"run": "20300101-000001"}
    stored(*decoded, *({**one, **other} for one in paged))
    assert render("decode") == alone

"""Packed sequences: timed lengths, calls, comparisons and verification."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench import lengths as timed
from bench import measure as measuring
from bench.cases import Case, select
from bench.inputs import Inputs, make_inputs
from bench.lengths import equal_entries, lengths_of, offsets_of
from bench.lines import place, problems
from bench.peers import PEERS, select_peers
from bench.stored import kind
from bench.verify import Truth

from .bench_rows import row
from .test_bench_measure import BACKWARD, CASE, _measure

#: The lengths of sequences in these tests, by the name of their kind.
_KINDS = {"some": (7, 1, 20, 12), "same": (10, 10, 10, 10)}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds kinds of sequences that are short enough for the NumPy backend."""
    known = timed.lengths_of
    for module in ("lengths", "case", "torch_peers", "feature_cases"):
        monkeypatch.setattr(f"bench.{module}.lengths_of", lambda n: _KINDS.get(n) or known(n))


def test_lengths_are_those_that_the_kind_says() -> None:
    assert len(lengths_of("cut-16")) == 16
    assert len(lengths_of("cut-64")) == 64
    assert sum(lengths_of("cut-16")) == sum(lengths_of("cut-64")) == timed.TOKENS
    assert set(lengths_of("equal-8")) == {4096}
    mixed = lengths_of("zipf")
    assert len(mixed) == 512
    assert 16 <= min(mixed) < 20
    assert 4000 < max(mixed) <= 8192
    assert np.median(mixed) < 100
    for name in ("cut-16", "zipf"):
        assert np.diff(offsets_of(name)).tolist() == list(lengths_of(name))
    assert offsets_of("zipf").dtype == np.int32


def test_equal_ones_take_turns_with_a_batch() -> None:
    for case in select("packed,packed-backward"):
        entries = equal_entries(case.lengths)
        assert case.seqlen_q == case.seqlen_kv == sum(lengths_of(case.lengths))
        assert case.features == ("packed_lengths",)
        assert bool(entries) == case.lengths.startswith("equal")
        assert case.extras == (["packed_lengths"] if entries else [])
        if entries:
            (plain,) = case.companions
            assert (plain.batch, plain.seqlen_q) == (entries, case.seqlen_q // entries)
            assert plain.flops == case.flops
            assert (plain.features, plain.options) == ((), {"algorithm": "fa3"})
        else:
            assert case.companions == []
    assert equal_entries(None) == 0


def test_operations_are_of_pairs_of_the_same_sequence() -> None:
    case = replace(CASE, lengths="some", seqlen_q=40, seqlen_kv=40)
    assert case.flops == replace(CASE, seqlen_q=1, seqlen_kv=1).flops * (49 + 1 + 400 + 144)


@pytest.mark.parametrize("case", [CASE, BACKWARD], ids=str)
@pytest.mark.parametrize("name", _KINDS)
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_are_verified(case: Case, name: str, causal: bool) -> None:
    case = replace(case, dtype="float16", algorithm="fa2", lengths=name, causal=causal)
    inputs = make_inputs(case, np)
    truth = Truth(case, inputs)
    assert 0 < truth.worst_ratio(_ours(case, inputs)) < 2
    moved = {n: inputs.cu_seqlens_q + np.int32([0, 1, 0, 0, 0]) for n in _OFFSETS}
    assert truth.worst_ratio(_ours(case, replace(inputs, **moved))) > truth.limit
    if not causal:
        whole = replace(case, lengths=None)
        one = [x[0] for x in _ours(whole, inputs)]
        assert truth.worst_ratio(one) > truth.limit


_OFFSETS = ("cu_seqlens_q", "cu_seqlens_kv")


def _ours(case: Case, inputs: Inputs) -> list[Any]:
    found = PEERS["cuflash"].prepare(case, inputs)()
    return list(found) if isinstance(found, tuple) else [found]


def test_a_packed_call_takes_turns_with_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "digest_now", lambda algorithm, op, features: str(features))
    case = replace(CASE, dtype="float16", algorithm="fa2", lengths="same", causal=True)
    rows, lines = _measure(case, **{"cuflash fa2 packed_lengths": 2.0, "cuflash fa2": 3.0})
    assert lines == []
    assert [(one["batch"], one["seqlen_q"], one["options"]) for one in rows] == [
        (1, 40, {"algorithm": "fa2", "lengths": "same"}),
        (4, 10, {"algorithm": "fa2"}),
    ]


def test_one_line_of_a_table_has_both() -> None:
    packed, *_ = [case for case in select("packed") if case.lengths == "equal-8"]
    rows = [row(case, "cuflash", 100.0) for case in (packed, packed.plain)]
    (line,) = problems(rows)
    assert line == rows
    assert place(rows[0])[-1] == "causal, equal-8"
    assert [kind(one) for one in rows] == ["packed sequences", ""]


def test_peers_that_pack() -> None:
    (case, *_) = select("packed")
    assert [peer.name for peer in select_peers(None) if peer.supports(case)] == ["fa4"]

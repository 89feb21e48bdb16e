"""Dropout: calls of cuflash and PyTorch, and one verification for different random draws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
from bench import measure as measuring
from bench.cases import Case, select
from bench.dropped import DroppedTruth, truth_of
from bench.inputs import Inputs, make_inputs
from bench.peers import PEERS, select_peers
from bench.stored import kind, of_set
from bench.tables import render
from bench.verify import Truth

from .bench_rows import rows_of
from .fake_torch import FakeTorch, fake_torch
from .test_bench_measure import _measure, _peer
from .test_bench_report import Store, stored

__all__ = ["fake_torch", "stored"]

LONG = Case("forward", "bfloat16", 1, 4, 2, 32, 32, 320, 320, False, "fa2", dropout_p=0.1)
CASES = [replace(LONG, op=op, causal=c) for op in ("forward", "backward") for c in (False, True)]


def test_dropout_comes_with_the_call_without_it() -> None:
    forward, backward = select("dropout"), select("dropout-backward")
    assert [replace(case, op="backward") for case in forward] == backward
    assert {(c.head_dim, c.causal) for c in forward} == {(d, c) for d in (64, 128) for c in (0, 1)}
    assert {case.seqlen_q for case in forward} == {2048, 4096, 8192}
    for case in [*forward, *backward]:
        assert case.companions == [replace(case, dropout_p=None)]
        assert (case.features, case.extras, case.arrays) == (("dropout",), ["dropout"], ())
        assert case.options["dropout_p"] == case.peer_options["dropout_p"] == 0.1
        assert case.keywords == {"algorithm": "fa3", "dropout_p": 0.1, "dropout_seed": 1}
        assert case.plain.keywords == {"algorithm": "fa3"}
        assert case.flops == case.plain.flops
    assert str(forward[0]) == "fa3 forward bfloat16 8x2048x32x64 full dropout 0.1"


def _ours(case: Case, inputs: Inputs, **more: Any) -> tuple[Any, ...]:
    q, k, v = inputs.q, inputs.k, inputs.v
    options = {**inputs.asked(case), **more}
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    if case.op == "forward":
        return (out,)
    found: tuple[Any, ...] = cuflash.attention_backward(inputs.dout, q, k, v, out, lse, **options)
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_draws_of_the_right_probability_are_verified(case: Case) -> None:
    inputs = make_inputs(case, np)
    truth = truth_of(case, inputs)
    assert isinstance(truth, DroppedTruth)
    assert type(truth_of(case.plain, inputs)) is Truth
    for seed in (1, 2):
        right = _ours(case, inputs, dropout_seed=seed)
        assert truth.worst_ratio(right) < truth.limit
    for p in (0.05, 0.15):
        assert truth.worst_ratio(_ours(case, inputs, dropout_p=p)) > truth.limit
    without = _ours(case.plain, inputs)
    assert truth.worst_ratio(without) > truth.limit
    smaller = [np.asarray(a, np.float32) * 0.9 for a in right]
    assert truth.worst_ratio(smaller) > truth.limit
    assert truth.worst_ratio([np.full_like(a, np.nan) for a in smaller]) > truth.limit


@pytest.mark.parametrize("case", CASES[2:], ids=str)
@pytest.mark.parametrize("place", range(3))
def test_each_gradient_is_verified(case: Case, place: int) -> None:
    inputs = make_inputs(case, np)
    found = list(_ours(case, inputs))
    found[place] = np.asarray(found[place], np.float32) * 0.9
    truth = truth_of(case, inputs)
    assert truth.worst_ratio(found) > truth.limit


def test_dropout_reaches_our_own_call() -> None:
    for case in CASES[1:3]:
        inputs = make_inputs(case, np)
        found = PEERS["cuflash"].prepare(case, inputs)()
        found = found if isinstance(found, tuple) else (found,)
        expected = _ours(case, inputs, dropout_seed=1)
        assert all(np.array_equal(*both) for both in zip(found, expected, strict=True))


def test_dropout_takes_turns_with_the_call_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "digest_now", lambda algorithm, op, features: str(features))
    peer = _peer("quick", lambda case, inputs: _ours(case, inputs, dropout_seed=7))
    without = _peer("slow", lambda case, inputs: _ours(case.plain, inputs))
    rows, lines = _measure(LONG, peer, without, **{"cuflash fa2 dropout": 2.0, "quick": 4.0})
    assert [(row["impl"], row["options"], row["ratio"], row["sources"]) for row in rows] == [
        ("cuflash", {"algorithm": "fa2", "dropout_p": 0.1}, 2.0, "('dropout',)"),
        ("cuflash", {"algorithm": "fa2"}, 2.0, "()"),
        ("the quick", {"dropout_p": 0.1}, 0.5, None),
    ]
    assert len(lines) == 1
    assert "left out: the slow" in lines[0]


@pytest.mark.parametrize("name", ["flash", "cudnn", "efficient"])
@pytest.mark.parametrize("causal", [False, True])
def test_pytorch_is_asked_to_drop(fake_torch: FakeTorch, name: str, causal: bool) -> None:
    case = Case("forward", "bfloat16", 2, 3, 3, 8, 8, 5, 5, causal, "fa2", dropout_p=0.25)
    (peer,) = select_peers(name)
    assert peer.supports(case)
    inputs = make_inputs(case, np)
    for one in (case, case.plain):
        peer.prepare(one, inputs)()
    options = [asked["options"] for _, asked in fake_torch.calls]
    plain = {"is_causal": causal, "enable_gqa": False}
    assert options == [{**plain, "dropout_p": 0.25}, plain]


def test_what_has_no_dropout_is_not_asked() -> None:
    (case,) = {replace(case, seqlen_q=8, seqlen_kv=8) for case in select("dropout")[:1]}
    asked = {peer.name for peer in select_peers(None) if peer.supports(case)}
    assert asked == {"flash", "cudnn", "efficient", "math"}
    biased = replace(case, bias=True)
    assert not any(peer.supports(biased) for peer in select_peers(None))


@pytest.mark.parametrize("name", ["dropout", "dropout-backward"])
def test_dropout_stands_beside_the_call_without_it(stored: Store, name: str) -> None:
    rows = rows_of(name, "torch flash", "torch cudnn", ratio=1.6)
    assert of_set(name, rows) == rows
    assert {kind(row) for row in rows} == {"dropout", ""}
    stored(*rows)
    text = render(name)
    assert (
        "| mask | cuflash fa3, dropout | cuflash fa3 | torch flash | torch cudnn "
        "| ratio to the best other | at least | of the call without dropout |"
    ) in text
    assert "| 128 | 32 | 8192 | causal | 100 | 50.0 | 200 | 200 | 1.60 | 0.40 | 0.625 |" in text
    assert "**Dropout**: cuflash fa3, dropout is 1.60 times" in text
    assert "(geometric mean of 10)" in text
    assert "docs/charts" not in text

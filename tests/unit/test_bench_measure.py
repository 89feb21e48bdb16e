"""Peers are timed if they can compute a case, compared with cuflash, and verified."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
from bench import measure as measuring
from bench import timing
from bench.cases import Case
from bench.inputs import Inputs, make_inputs, narrowed, widened
from bench.measure import LeftOutError, measure
from bench.peers import PEERS, Peer, importable, select_peers
from bench.run import _line

from .test_bench import KEYS

CASE = Case("forward", "float32", 1, 2, 2, 16, 16, 40, 40, False, "fa1")
BACKWARD = replace(CASE, op="backward")


def _peer(name: str, call: Callable[[Case, Inputs], Any], version: str = "1") -> Peer:
    return Peer(
        name,
        f"the {name}",
        lambda: version,
        lambda case: True,
        lambda case, inputs: lambda: call(case, inputs),
        lambda result: result if isinstance(result, tuple) else (result,),
    )


def _right(case: Case, inputs: Inputs) -> Any:
    q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.dout
    out, lse = cuflash.attention(q, k, v, causal=case.causal, return_lse=True)
    if case.op == "forward":
        return out
    return cuflash.attention_backward(dout, q, k, v, out, lse, causal=case.causal)


def _clock(milliseconds: dict[str, float]) -> Callable[[str, Callable[[], Any]], float]:
    def clock(name: str, function: Callable[[], Any]) -> float:
        function()
        return milliseconds[name]

    return clock


def _measure(
    case: Case, *peers: Peer, protocols: tuple[str, ...] = ("turns",), **times: float
) -> tuple[list[dict[str, Any]], list[str]]:
    lines: list[str] = []
    clock = _clock({"cuflash fa1": 2.0, "cuflash fa2": 1.0, **times})
    return measure(case, peers, protocols, make_inputs(case, np), lines.append, clock), lines


@pytest.mark.parametrize("case", [CASE, BACKWARD])
def test_rows_of_ours_and_of_a_peer(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    monkeypatch.setattr(timing, "REST", 0.0)
    protocols = ("rested", "turns")
    rows, lines = _measure(case, _peer("quick", _right), protocols=protocols, quick=1.0)
    assert lines == []
    assert [(row["impl"], row["protocol"]) for row in rows] == [
        (impl, protocol) for protocol in protocols for impl in ("cuflash", "the quick")
    ]
    ours, theirs = rows[2:]
    assert [*KEYS[:3], *ours] == KEYS
    assert (ours["ms"], ours["ratio"], ours["ratio_low"]) == (2.0, 0.5, 0.5)
    assert (theirs["ms"], theirs["ratio"]) == (1.0, 2.0)
    assert ours["tflops"] == round(case.flops / 2e9, 2)
    assert (ours["options"], theirs["options"]) == ({"algorithm": "fa1"}, {})
    assert ours["plan"].startswith("fa1 ")
    assert theirs["plan"] is theirs["sources"] is None
    assert len(ours["sources"]) == 16
    assert 0 < ours["worst_ratio"] < 50
    assert "0.50 of the best other (at least 0.50)" in _line(case, ours)


def test_the_ratio_is_to_the_best_of_the_others() -> None:
    peers = [_peer("quick", _right), _peer("quicker", _right)]
    rows, _ = _measure(CASE, *peers, quick=1.0, quicker=0.5)
    assert [row["ratio"] for row in rows] == [0.25, 0.5, 2.0]


def test_alone_there_is_no_ratio() -> None:
    rows, _ = _measure(CASE)
    assert [(row["ratio"], row["ratio_low"]) for row in rows] == [(None, None)]


def test_a_peer_that_fails_is_left_out_with_a_line() -> None:
    def fails(case: Case, inputs: Inputs) -> Any:
        raise RuntimeError("No available kernel.\nand more")

    rows, lines = _measure(CASE, _peer("weak", fails), _peer("quick", _right), quick=1.0)
    assert [row["impl"] for row in rows] == ["cuflash", "the quick"]
    assert lines == [f"left out: the weak, {CASE}: RuntimeError: No available kernel."]


@pytest.mark.parametrize("bad", [np.nan, 1.0])
def test_a_peer_that_computes_something_else_is_left_out(bad: float) -> None:
    def wrong(case: Case, inputs: Inputs) -> Any:
        out = _right(case, inputs).copy()
        out[0, -1, -1, 3] += np.float32(bad)
        return out

    rows, lines = _measure(CASE, _peer("wrong", wrong))
    assert [row["impl"] for row in rows] == ["cuflash"]
    assert "times what rounding explains" in lines[0]


def test_ours_must_be_right(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(PEERS["cuflash"], prepare=lambda case, inputs: lambda: inputs.v)
    monkeypatch.setitem(measuring.PEERS, "cuflash", wrong)
    with pytest.raises(RuntimeError, match="cuflash, fa1 forward"):
        _measure(CASE)


def test_a_case_that_the_library_cannot_do_says_why() -> None:
    with pytest.raises(LeftOutError, match="cuflash: fa3 is for Hopper GPUs"):
        _measure(replace(CASE, algorithm="fa3"))


def test_generations_take_turns_without_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "digest_now", lambda algorithm, op, features: algorithm)
    case = replace(CASE, algorithm="fa2", beside=("fa1",))
    rows, lines = _measure(case, _peer("quick", _right))
    assert lines == []
    assert [(r["impl"], r["options"]["algorithm"], r["sources"], r["ratio"]) for r in rows] == [
        ("cuflash", "fa2", "fa2", 2.0),
        ("cuflash", "fa1", "fa1", 0.5),
    ]


def test_a_package_that_is_not_there_is_left_out() -> None:
    def absent() -> str:
        raise ModuleNotFoundError("No module named 'torch'")

    lines: list[str] = []
    here = _peer("quick", _right)
    assert importable([replace(here, version=absent), here], lines.append) == [here]
    assert lines == ["left out: the quick: No module named 'torch'"]


def test_peers_are_named() -> None:
    everyone = ["by-hand", "flash", "cudnn", "efficient", "math", "fa4", "flex"]
    assert [peer.name for peer in select_peers(None)] == everyone
    assert [peer.name for peer in select_peers("flash,cudnn")] == ["flash", "cudnn"]
    assert select_peers("") == []
    with pytest.raises(SystemExit, match="no peer 'cuflash'; there are by-hand, flash"):
        select_peers("cuflash")


@pytest.mark.parametrize(
    ("change", "able"),
    [
        ({"dtype": "bfloat16"}, {"by-hand", "flash", "cudnn", "efficient", "math", "fa4"}),
        ({"dtype": "float32"}, {"by-hand", "efficient", "math"}),
        ({"dtype": "float64"}, {"by-hand", "math"}),
        ({"dtype": "float16", "op": "backward", "seqlen_q": 2**20, "seqlen_kv": 2**20}, "many"),
        ({"dtype": "float16", "causal": True, "seqlen_q": 8}, set()),
        ({"dtype": "float16", "blocks": (64, 64)}, set()),
        ({"dtype": "float16", "window_size": (5, 0)}, {"fa4"}),
        ({"dtype": "float16", "window_size": (5, 0), "seqlen_q": 8}, set()),
        ({"dtype": "float16", "sinks": True}, {"fa4"}),
        ({"dtype": "float16", "softcap": 1.0}, {"fa4"}),
        ({"dtype": "float16", "alibi": True, "causal": True}, {"flex"}),
        ({"dtype": "float32", "alibi": True, "causal": True}, set()),
        ({"dtype": "float16", "alibi": True}, set()),
        ({"dtype": "bfloat16", "bias": True}, {"cudnn", "efficient", "math", "flex"}),
        ({"dtype": "bfloat16", "bias": True, "dbias": True}, {"efficient", "math", "flex"}),
        ({"dtype": "float32", "bias": True}, {"efficient", "math"}),
        ({"dtype": "bfloat16", "bias": True, "causal": True}, set()),
        ({"dtype": "bfloat16", "bias": True, "window_size": (5, 0)}, set()),
        ({"dtype": "bfloat16", "bias": True, "alibi": True, "causal": True}, set()),
        ({"dtype": "bfloat16", "mask": "blocks"}, {"cudnn", "efficient", "math", "flex"}),
        ({"dtype": "float32", "mask": "blocks"}, {"efficient", "math"}),
        ({"dtype": "bfloat16", "mask": "blocks", "causal": True}, set()),
        ({"dtype": "bfloat16", "mask": "blocks", "window_size": (5, 0)}, set()),
        ({"dtype": "bfloat16", "mask": "blocks", "bias": True}, set()),
        ({"dtype": "bfloat16", "mask": "causal", "seqlen_q": 8}, set()),
        ({"dtype": "float32", "mask": "padding", "seqlen_q": 8}, {"efficient", "math"}),
    ],
)
def test_what_peers_are_asked(change: dict[str, Any], able: Any) -> None:
    case = replace(CASE, **change)
    if able == "many":
        able = {"flash", "cudnn", "efficient", "fa4"}
    assert {peer.name for peer in select_peers(None) if peer.supports(case)} == able


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_inputs_are_the_same_in_every_run(dtype: str) -> None:
    case = replace(CASE, dtype=dtype)
    one, two = make_inputs(case, np), make_inputs(case, np)
    assert one.q.dtype.name == dtype
    assert np.array_equal(one.dout, two.dout)
    assert np.array_equal(widened(one.k), one.k.astype(np.float64))


def test_bfloat16_is_rounded_as_it_should_be() -> None:
    halfway = (np.arange(64, dtype=np.uint32) << 15) + np.uint32(0x3F800000)
    values = np.concatenate([halfway.view(np.float32), make_inputs(CASE, np).q.ravel()])
    expected = values.astype(ml_dtypes.bfloat16)
    assert np.array_equal(narrowed(values, "bfloat16"), expected)


def test_the_ratio_is_of_paired_rounds() -> None:
    ours, theirs = [1.0, 2.0, 4.0] * 7, [2.0, 4.0, 8.0] * 7
    assert timing.median_ratio(ours, theirs) == (2.0, 2.0, 2.0)
    theirs[:3] = [0.1, 0.1, 0.1]
    assert timing.median_ratio(ours, theirs)[0] == 2.0


def test_the_interval_is_of_order_statistics() -> None:
    assert [timing.interval(n) for n in (3, 5, 6, 12, 21)] == [0, 0, 0, 2, 5]
    theirs = [float(n) for n in range(1, 22)]
    random.Random(0).shuffle(theirs)
    assert timing.median_ratio([1.0] * 21, theirs) == (11.0, 6.0, 16.0)


def test_the_interval_holds_the_median_in_95_of_100() -> None:
    draw, held = random.Random(0), 0
    for _ in range(2000):
        values = sorted(draw.random() for _ in range(21))
        below = timing.interval(21)
        held += values[below] <= 0.5 <= values[-1 - below]
    assert 0.95 <= held / 2000 <= 0.99


def test_a_spin_grows_until_the_host_is_hidden() -> None:
    spins: list[float] = []

    def once(spin: float) -> tuple[float, bool]:
        spins.append(spin)
        return 10.0 - spin, spin < 4.0

    assert timing.hidden(once, 1.0) == (6.0, 4.0)
    assert spins == [1.0, 2.0, 4.0]
    assert timing.hidden(lambda spin: (7.0, True), 1.0) == (7.0, timing.LONGEST_SPIN)


def test_turns_are_rounds_in_shuffled_order() -> None:
    order: list[str] = []

    def clock(name: str, function: Callable[[], Any]) -> float:
        order.append(name)
        return float(len(order))

    calls: dict[str, Callable[[], Any]] = {name: lambda: None for name in "abc"}
    times = timing.turns(calls, clock=clock)
    assert {name: len(values) for name, values in times.items()} == {"a": 21, "b": 21, "c": 21}
    rounds = [tuple(order[i : i + 3]) for i in range(3, len(order), 3)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len(set(rounds)) > 3


def test_a_slow_launch_is_repeated_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "REST", 0.0)
    clock = _clock({"quick": 0.1, "slow": 60.0, "slower": 900.0})
    calls: dict[str, Callable[[], Any]] = dict.fromkeys(("quick", "slow", "slower"), lambda: None)
    times = timing.rested(calls, clock=clock)
    assert [len(times[name]) for name in calls] == [12, 6, 5]

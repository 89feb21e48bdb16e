"""Windows and extra features: calls of cuflash and of peers, comparisons, and tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
from bench import measure as measuring
from bench.cases import Case
from bench.inputs import Inputs, make_inputs
from bench.peers import PEERS
from bench.pooled import summary
from bench.stored import has_extras, of_set
from bench.tables import render
from bench.verify import Truth

from .bench_rows import rows_of
from .test_bench_measure import CASE, _measure, _peer
from .test_bench_report import Store, stored
from .whole_attention import whole_attention

__all__ = ["stored"]


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_sinks_take_turns_with_the_call_without_them(
    monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    monkeypatch.setattr(measuring, "digest_now", lambda algorithm, op, features: str(features))
    monkeypatch.setattr(measuring, "plan_of", lambda case, inputs: str(case.sinks))
    ours = replace(PEERS["cuflash"], prepare=_by_whole_matrices)
    monkeypatch.setitem(measuring.PEERS, "cuflash", ours)
    case = replace(CASE, op=op, sinks=True, window_size=(7, 0))
    peer = _peer("quick", lambda case, inputs: tuple(whole_attention(case, inputs)))
    times = {"cuflash fa1 sinks": 2.0, "cuflash fa1": 1.0, "quick": 4.0}
    rows, lines = _measure(case, peer, **times)
    assert lines == []
    window = {"algorithm": "fa1", "window_size": (7, 0)}
    assert [(row["impl"], row["options"], row["ratio"]) for row in rows] == [
        ("cuflash", {**window, "sinks": True}, 2.0),  # relative to the peer
        ("cuflash", window, 2.0),  # relative to ours with sinks
        ("the quick", {"window_size": (7, 0), "sinks": True}, 0.5),  # relative to ours with sinks
    ]
    assert [row["sources"] for row in rows] == ["('window', 'sinks')", "('window',)", None]
    assert [row["plan"] for row in rows] == ["True", "False", None]


def _by_whole_matrices(case: Case, inputs: Inputs) -> Callable[[], Any]:
    return lambda: tuple(whole_attention(case, inputs))


def test_a_peer_that_leaves_the_sinks_out_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = replace(PEERS["cuflash"], prepare=_by_whole_matrices)
    monkeypatch.setitem(measuring.PEERS, "cuflash", ours)
    monkeypatch.setattr(measuring, "plan_of", lambda case, inputs: "")
    monkeypatch.setattr(measuring, "digest_now", lambda algorithm, op, features: "")
    without = _peer(
        "quick", lambda case, inputs: whole_attention(replace(case, sinks=False), inputs)[0]
    )
    case = replace(CASE, dtype="bfloat16", causal=True, sinks=True)
    rows, lines = _measure(case, without, **{"cuflash fa1 sinks": 1.0})
    assert [row["impl"] for row in rows] == ["cuflash", "cuflash"]
    assert "the quick" in lines[0]
    assert "times what rounding explains" in lines[0]


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_a_window_reaches_our_own_call(op: str) -> None:
    rows, lines = _measure(replace(CASE, op=op, algorithm="fa2", window_size=(5, 2)))
    assert lines == []
    assert rows[0]["options"] == {"algorithm": "fa2", "window_size": (5, 2)}
    assert rows[0]["worst_ratio"] < 10
    assert rows[0]["plan"].startswith("fa2 ")


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_sinks_reach_our_own_call(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    seen: list[Any] = []

    def forward(*arrays: Any, **options: Any) -> Any:
        seen.append(options)
        return ("out", "lse") if options.get("return_lse") else "out"

    def backward(*arrays: Any, **options: Any) -> Any:
        seen.append(options)
        assert arrays[-2:] == ("out", "lse")

    monkeypatch.setattr(cuflash, "attention", forward)
    monkeypatch.setattr(cuflash, "attention_backward", backward)
    case = replace(CASE, op=op, sinks=True, window_size=(5, 0), blocks=(64, 64))
    inputs = make_inputs(case, np)
    PEERS["cuflash"].prepare(case, inputs)()
    asked = {"causal": False, "algorithm": "fa1", "window_size": (5, 0), "sinks": inputs.sinks}
    if op == "forward":
        assert seen == [{**asked, "blocks": (64, 64)}]
    else:
        wrt = ("q", "k", "v", "sinks")
        assert seen == [{**asked, "return_lse": True}, {**asked, "blocks": (64, 64), "wrt": wrt}]
    seen.clear()
    PEERS["cuflash"].prepare(replace(case, sinks=False), inputs)()
    assert all("sinks" not in options and "wrt" not in options for options in seen)


@pytest.mark.parametrize(
    ("asked", "arrays", "wanted"),
    [
        ({"alibi": True}, ["alibi_slopes"], None),
        ({"bias": True}, ["bias"], None),
        ({"bias": True, "dbias": True}, ["bias"], ("q", "k", "v", "bias")),
    ],
)
@pytest.mark.parametrize("op", ["forward", "backward"])
def test_slopes_and_a_bias_reach_our_own_call(
    monkeypatch: pytest.MonkeyPatch, op: str, asked: Any, arrays: list[str], wanted: Any
) -> None:
    seen: list[Any] = []
    backward = cuflash.attention_backward

    def record(*given: Any, **options: Any) -> Any:
        seen.append(options)
        return backward(*given, **options)

    monkeypatch.setattr(cuflash, "attention_backward", record)
    case = replace(CASE, op=op, algorithm="fa2", batch=2, **asked)
    inputs = make_inputs(case, np)
    assert list(inputs.features(case)) == arrays
    found = PEERS["cuflash"].prepare(case, inputs)()
    found = found if isinstance(found, tuple) else (found,)
    assert Truth(case, inputs).worst_ratio(found) < 10
    if op == "forward":
        assert not case.gradients
        assert not seen
    else:
        assert seen[0].get("wrt") == wanted
        assert len(found) == 3 + len(case.gradients)


def test_a_bias_takes_turns_with_the_call_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "digest_now", lambda algorithm, op, features: str(features))
    case = replace(CASE, op="backward", algorithm="fa2", bias=True, dbias=True)
    peer = _peer("quick", lambda case, inputs: tuple(whole_attention(case, inputs)))
    rows, lines = _measure(case, peer, **{"cuflash fa2 bias dbias": 2.0, "quick": 4.0})
    assert lines == []
    extras = {"bias": (1, 2, 40, 40), "dbias": True}
    assert [(row["options"], row["ratio"], row["sources"]) for row in rows] == [
        ({"algorithm": "fa2", **extras}, 2.0, "('bias', 'dbias')"),
        ({"algorithm": "fa2"}, 2.0, "()"),
        (extras, 0.5, None),
    ]


@pytest.mark.parametrize("name", ["sinks", "sinks-backward"])
def test_sinks_stand_beside_the_call_without_them(stored: Store, name: str) -> None:
    rows = rows_of(name, "flash-attn-4", ratio=1.1)
    for r in rows:
        if r["impl"] == "cuflash" and not r["options"].get("sinks"):
            r["ratio"] = 1.004  # the speed relative to the call with sinks
    stored(*rows)
    text = render(name)
    assert (
        "| mask | cuflash fa3, sinks | cuflash fa3 | flash-attn-4 | ratio to the best other "
        "| at least | of the call without sinks |"
    ) in text
    cells = "100 | 50.0 | 200 | 1.10 | 0.40 | 0.996 |"
    assert f"| 64 | 64/16 | 8192 | causal | {cells}" in text
    assert f"| 64 | 64/16 | 8192 | window (127, 0) | {cells}" in text
    assert "**Sinks**: cuflash fa3, sinks is 1.10 times" in text
    assert "(geometric mean of 2)" in text


def test_soft_caps_stand_beside_the_call_without_them(stored: Store) -> None:
    rows = rows_of("softcap", "flash-attn-4", ratio=2.5)
    for r in rows:
        if r["impl"] == "cuflash" and not r["options"].get("softcap"):
            r["ratio"] = 1.25
    stored(*rows)
    text = render("softcap")
    assert "| mask | cuflash fa3, softcap | cuflash fa3 | flash-attn-4 |" in text
    assert "| at least | of the call without a cap |" in text
    assert text.count("| 2.50 | 0.40 | 0.800 |") == 3
    assert "**Soft caps**: cuflash fa3, softcap is 2.50 times" in text


@pytest.mark.parametrize("name", ["alibi", "alibi-backward"])
def test_slopes_stand_beside_the_call_without_them(stored: Store, name: str) -> None:
    stored(*rows_of(name, "torch flex", ratio=1.6))
    text = render(name)
    assert (
        "| mask | cuflash fa3, alibi | cuflash fa3 | torch flex | ratio to the best other "
        "| at least | of the call without slopes |"
    ) in text
    assert "| 64 | 64 | 8192 | causal | 100 | 50.0 | 200 | 1.60 | 0.40 | 0.625 |" in text
    assert "**ALiBi**: cuflash fa3, alibi is 1.60 times" in text
    assert "docs/charts" not in text


def test_a_bias_with_its_gradient_is_a_line_of_its_own(stored: Store) -> None:
    rows = rows_of("bias-backward", "torch efficient", ratio=2.0)
    for r in rows:
        r["tflops"] += 3 if r["options"].get("dbias") else 0
    stored(*rows)
    text = render("bias-backward")
    header = "| mask | gradient of the bias | cuflash fa3, bias | cuflash fa3 | torch efficient |"
    assert header in text
    assert "| at least | of the call without a bias |" in text
    line = "| 32 | 1024 | 256 | full | {} | {} | 50.0 | {} | 2.00 | 0.40 | 0.500 |"
    assert line.format("no", 100, 200) in text
    assert line.format("yes", 103, 203) in text
    assert "**Bias**: cuflash fa3, bias is 2.00 times" in text
    assert "**Bias with its gradient**: cuflash fa3, bias is 2.00 times" in text
    assert text.count("(geometric mean of 4)") == 2
    assert "docs/charts" not in text
    lines = summary(rows)
    assert sum("bias with its gradient: 2.000 times" in line for line in lines) == 1


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_features_elsewhere_are_a_line_each(stored: Store, op: str) -> None:
    name = "features-elsewhere" + ("-backward" if op == "backward" else "")
    rows = rows_of(name, ratio=1.25)
    for r in rows:
        if has_extras(r):
            r["ratio"] = r["ratio_low"] = None
    stored(*rows)
    text = render(name)
    header = "| mask | call | with it | without | of the call without |"
    assert text.startswith(f"NVIDIA Abacus, bfloat16, {op}, TFLOP/s, taking turns, 2030-01-01\n\n")
    assert header in text
    assert "| 64 | 64 | 4096 | causal | cuflash fa2, alibi | 100 | 50 | 0.800 |" in text
    for feature in ("softcap", "bias"):
        line = f"| 192 | 32 | 4096 | full | cuflash fa3, {feature} | 100 | 50 | 0.800 |"
        assert line in text
    assert text.count("| 0.800 |") == 15
    stored(*rows_of(name, "torch flex", ratio=1.25))
    assert "| 100 | 50 | 0.800 | 1.25 | 0.40 |" in render(name)


def test_windows_are_summed_up_without_what_they_are_compared_with(stored: Store) -> None:
    stored(*rows_of("windows-backward", "flash-attn-4", ratio=1.1))
    text = render("windows-backward")
    assert "| 128 | 16 | 16384 | window (4095, 0) | 100 | 200 | 1.10 | 0.40 |" in text
    assert "| 128 | 16 | 16384 | causal | 100 | 200 | 1.10 | 0.40 |" in text
    assert "| 64 | 64 | 8192 | window (512, 512) |" in text
    windows, plain = text.split("**Backward**")
    assert "(geometric mean of 5)" in windows
    assert "(geometric mean of 1)" in plain
    assert "docs/charts" not in text


def test_plain_rows_alone_are_no_run_of_a_set_of_windows(stored: Store) -> None:
    grid_rows = rows_of("fa3-backward", "flash-attn-4", run="2")
    stored(*grid_rows)
    assert render("windows-backward") == ""
    windows = rows_of("windows-backward", "flash-attn-4", run="1")
    assert of_set("windows-backward", [*windows, *grid_rows]) == windows
    assert of_set("fa3-backward", [*windows, *grid_rows]) == grid_rows

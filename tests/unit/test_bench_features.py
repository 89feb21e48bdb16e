"""Windows and sinks: what ours and peers are asked, what is compared, and what tables show."""

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
from bench.stored import of_set
from bench.tables import render

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
    monkeypatch.setattr(measuring, "_plan", lambda case, inputs: str(case.sinks))
    ours = replace(PEERS["cuflash"], prepare=_by_whole_matrices)
    monkeypatch.setitem(measuring.PEERS, "cuflash", ours)
    case = replace(CASE, op=op, sinks=True, window_size=(7, 0))
    peer = _peer("quick", lambda case, inputs: tuple(whole_attention(case, inputs)))
    times = {"cuflash fa1 sinks": 2.0, "cuflash fa1": 1.0, "quick": 4.0}
    rows, lines = _measure(case, peer, **times)
    assert lines == []
    window = {"algorithm": "fa1", "window_size": (7, 0)}
    assert [(row["impl"], row["options"], row["ratio"]) for row in rows] == [
        ("cuflash", {**window, "sinks": True}, 2.0),  # of the peer
        ("cuflash", window, 2.0),  # of ours with sinks
        ("the quick", {"window_size": (7, 0), "sinks": True}, 0.5),  # of ours with sinks
    ]
    assert [row["sources"] for row in rows] == ["('window', 'sinks')", "('window',)", None]
    assert [row["plan"] for row in rows] == ["True", "False", None]


def _by_whole_matrices(case: Case, inputs: Inputs) -> Callable[[], Any]:
    return lambda: tuple(whole_attention(case, inputs))


def test_a_peer_that_leaves_the_sinks_out_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = replace(PEERS["cuflash"], prepare=_by_whole_matrices)
    monkeypatch.setitem(measuring.PEERS, "cuflash", ours)
    monkeypatch.setattr(measuring, "_plan", lambda case, inputs: "")
    monkeypatch.setattr(measuring, "digest_now", lambda algorithm, op, features: "")
    without = _peer(
        "quick", lambda case, inputs: whole_attention(replace(case, sinks=False), inputs)[0]
    )
    case = replace(CASE, dtype="bfloat16", causal=True, sinks=True)
    rows, lines = _measure(case, without, **{"cuflash fa1 sinks": 1.0})
    assert [row["impl"] for row in rows] == ["cuflash", "cuflash"]
    assert "the quick" in lines[0]
    assert "times the error of its roundings" in lines[0]


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


@pytest.mark.parametrize("name", ["sinks", "sinks-backward"])
def test_sinks_stand_beside_the_call_without_them(stored: Store, name: str) -> None:
    rows = rows_of(name, "flash-attn-4", ratio=1.1)
    for r in rows:
        if r["impl"] == "cuflash" and not r["options"].get("sinks"):
            r["ratio"] = 1.004  # times as fast as with them
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


def test_windows_are_summed_up_without_what_they_are_compared_with(stored: Store) -> None:
    stored(*rows_of("windows-backward", "flash-attn-4", ratio=1.1))
    text = render("windows-backward")
    assert "| 128 | 16 | 16384 | window (4095, 0) | 100 | 200 | 1.10 | 0.40 |" in text
    assert "| 128 | 16 | 16384 | causal | 100 | 200 | 1.10 | 0.40 |" in text
    assert "| 64 | 64 | 8192 | window (512, 512) |" in text
    windows, plain = text.split("**Backward**")
    assert "(geometric mean of 5)" in windows
    assert "(geometric mean of 1)" in plain
    assert "bench/charts" not in text


def test_plain_rows_alone_are_no_run_of_a_set_of_windows(stored: Store) -> None:
    grid_rows = rows_of("fa3-backward", "flash-attn-4", run="2")
    stored(*grid_rows)
    assert render("windows-backward") == ""
    windows = rows_of("windows-backward", "flash-attn-4", run="1")
    assert of_set("windows-backward", [*windows, *grid_rows]) == windows
    assert of_set("fa3-backward", [*windows, *grid_rows]) == grid_rows

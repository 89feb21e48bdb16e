"""The CPU benchmark: rounds, ratios, the load by other processes, and the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import cpu, cpu_cases, run
from bench.cpu_cases import CASES, CpuCase, implementations
from bench.cpu_table import render_cpu

CASE = CpuCase("small", "float32", 2, 1, 5, 7, False, "forward", head_dim=4)
COMMON = {"cpu": "Abacus", "cores": 2, "blas": "beads", "environment": {}, "others": 2.04}


def test_all_take_turns_until_the_time_is_up() -> None:
    now, order = 0.0, []  # type: float, list[str]

    def lasting(name: str, seconds: float) -> Any:
        def call() -> None:
            nonlocal now
            now += seconds
            order.append(name)

        return call

    calls = {"slow": lasting("slow", 2.0), "fast": lasting("fast", 1.0)}
    timed = cpu.time_turns(calls, clock=lambda: now)
    assert timed == {"slow": [2000.0] * cpu.FEWEST, "fast": [1000.0] * cpu.FEWEST}
    rounds = [set(order[i : i + 2]) for i in range(0, len(order), 2)]
    assert all(names == {"slow", "fast"} for names in rounds), "each once a round"
    quick = cpu.time_turns({"quick": lasting("quick", 0.001)}, clock=lambda: now)
    assert len(quick["quick"]) == cpu.MOST


def test_ratios_say_how_many_times_as_fast_ours_is() -> None:
    names = ("cuflash", "cuflash jit", "torch", "jax.nn jit")
    timed = dict(zip(names, ([2.0] * 7, [4.0] * 7, [3.0] * 7, [1.0] * 7), strict=True))
    rows = cpu.rows_of(CASE, "alone", dict.fromkeys(names, "1"), timed)
    assert {row["impl"]: row["ratio"] for row in rows} == {
        "cuflash": 1.0,
        "cuflash jit": 2.0,
        "torch": 1.5,
        "jax.nn jit": 0.25,  # relative to "cuflash jit"
    }
    assert all(row["condition"] == "alone" and row["rounds"] == 7 for row in rows)


def test_the_load_ends_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    popen = cpu.subprocess.Popen

    def start(*arguments: Any, **options: Any) -> Any:
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(cpu.subprocess, "Popen", start)

    def interrupted() -> None:
        with cpu.loaded(1):
            assert started[0].poll() is None
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert started[0].returncode is not None


def test_what_other_processes_used_is_told() -> None:
    assert cpu.used_by_others((0.0, 10.0, 3.0), (2.0, 14.0, 4.0)) == 1.5
    assert cpu.used_by_others((0.0, 10.0, 3.0), (2.0, 11.0, 4.02)) == 0.0
    assert cpu.used_by_others(None, (2.0, 11.0, 4.0)) is None
    start = cpu.cores_used()
    end = cpu.cores_used()
    assert (start is None) == (end is None)
    assert start is None or start <= end  # type: ignore[operator]


@pytest.mark.parametrize("what", ["cases", "conditions"])
def test_unknown_names_are_refused(what: str) -> None:
    given = {
        "names": "small",
        "conditions": "alone",
        f"{'names' if what == 'cases' else what}": "x",
    }
    with pytest.raises(SystemExit, match=f"--{what}: no 'x'"):
        cpu.run_cpu(**given)


@pytest.mark.parametrize(
    ("asked", "others", "said"),
    [
        ("alone", 0.1, "alone"),
        ("alone", 1.3, "shared"),
        ("alone", None, "alone"),
        ("loaded", 2.0, "loaded"),
    ],
)
def test_the_table_does_not_call_a_busy_machine_quiet(
    asked: str,
    others: float | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    (row,) = cpu.rows_of(CASE, asked, {"cuflash": "1"}, {"cuflash": [2.0] * 7})
    stored = {"run": "1", "date": "1", **COMMON, **row, "peak_mib": 1.0, "others": others}
    (tmp_path / "cpu.json").write_text(json.dumps([stored]))
    assert f"| forward | {said} |" in render_cpu()


@pytest.mark.parametrize("op", ["forward", "forward and backward"])
@pytest.mark.parametrize(
    ("dtype", "causal", "heads_kv"), [("float32", True, 2), ("float16", False, 1)]
)
def test_all_implementations_compute_the_same(
    dtype: str, causal: bool, heads_kv: int, op: str
) -> None:
    pytest.importorskip("jax", reason="JAX is not installed")
    case = CpuCase("small", dtype, 2, heads_kv, 9, 9, causal, op, head_dim=8)
    answers = {}
    for name, (_, call) in implementations(case).items():
        found = call()
        found = list(found) if isinstance(found, (tuple, list)) else [found]
        arrays = [np.asarray(a.float() if hasattr(a, "float") else a, np.float32) for a in found]
        if "jit" in name:
            arrays = [a[0].swapaxes(0, 1) for a in arrays]
        answers[name] = [a.reshape(-1) for a in arrays]
    assert {"cuflash", "cuflash jit", "whole matrix"} <= set(answers)
    assert "jax.nn jit" in answers or dtype == "float16"  # some versions of JAX lack float16
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for name, arrays in answers.items():
        for got, wanted in zip(arrays, answers["cuflash"], strict=True):
            np.testing.assert_allclose(got, wanted, atol=tolerance, err_msg=name)


def test_the_table_has_the_last_run_of_each_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    assert render_cpu() == ""
    rows = []
    for stamp, ms in (("20300101-000000", 9.0), ("20300102-000000", 5.0)):
        timed = {"cuflash": [ms] * 7, "whole matrix": [10.0] * 7}
        versions = {"cuflash": "1", "whole matrix": "numpy 2"}
        for row in cpu.rows_of(CASE, "loaded", versions, timed):
            peak = 1.0 if row["impl"] == "cuflash" else 8.0
            rows.append({"run": stamp, "date": stamp[:8], **COMMON, **row, "peak_mib": peak})
    (tmp_path / "cpu.json").write_text(json.dumps(rows))
    lines = render_cpu().splitlines()
    assert "| 2/1 | 5 x 7 | float32 | full | forward | loaded | 2.0 | 5 ms | 2.00 |" in lines[-1]
    assert lines[-1].endswith("| 1.0 MiB | 0.125 |")
    assert sum("5 x 7" in line for line in lines) == 1


def test_a_peer_that_fails_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("cannot do that\nat all")

    monkeypatch.setattr(cpu_cases, "_whole", fail)
    assert "whole matrix" not in implementations(CASE)
    assert "left out: whole matrix: cannot do that\n" in capsys.readouterr().out
    monkeypatch.setattr(cpu_cases, "_ours", fail)
    with pytest.raises(ValueError, match="cannot do that"):
        implementations(CASE)


def test_cases_have_names_and_both_passes() -> None:
    assert {"8192", "2048", "decoding", "small"} <= set(CASES)
    assert {case.op for cases in CASES.values() for case in cases} == {
        "forward",
        "forward and backward",
    }

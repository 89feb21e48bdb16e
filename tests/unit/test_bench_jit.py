"""Gradients under ``jax.jit`` compared with the plain calls: timing, and stored rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import jit, run, tables
from bench import report as bench_report
from bench.inputs import make_inputs

KEYS = [
    *("impl", "op", "dtype", "batch", "heads_q", "head_dim", "seqlen_q", "causal"),
    *("ms", "spread", "ratio", "ratio_low"),
]
COMMON = {"run": "20261122-000000", "date": "2026-11-22", "gpu": "NVIDIA H200", "version": "jax 1"}


def test_a_round_waits_once_and_shares_its_time_among_the_passes() -> None:
    now, told = 0.0, []  # type: float, list[str]

    def queued(name: str) -> Any:
        return lambda: told.append(name) or name

    def wait(last: Any) -> None:
        nonlocal now
        now += {"slow": 0.024, "fast": 0.012}[last]
        told.append("wait")

    timed = jit.time_passes(
        {"slow": queued("slow"), "fast": queued("fast")}, wait, rounds=3, clock=lambda: now
    )
    assert timed == {"slow": pytest.approx([2.0] * 3), "fast": pytest.approx([1.0] * 3)}
    assert told[:4] == ["slow", "wait", "fast", "wait"]  # the first calls compile
    blocks = " ".join(told[4:]).split("wait")
    assert {len(block.split()) for block in blocks if block.strip()} == {jit.PASSES}
    assert all(len(set(block.split())) <= 1 for block in blocks)


def test_rows_compare_with_the_plain_calls_and_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, jitted = jit.IMPLEMENTATIONS
    rows = jit.rows_of(jit.CASES[1], {plain: [2.0] * 9, jitted: [4.0] * 9})
    assert [list(row) for row in rows] == [KEYS, KEYS]
    assert [row["ratio"] for row in rows] == [1.0, 0.5]
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    assert tables.render(tables.JIT) == ""
    stored = [{**COMMON, **row} for row in rows]
    (tmp_path / "nvidia-h200-jit.json").write_text(json.dumps(stored))
    shown = tables.render(tables.JIT)
    assert "| jax.jit(jax.grad) | causal | 4.000 | 0.500 | 0.500 |" in shown
    assert bench_report.names(f"<!-- results: {tables.JIT} -->") == [tables.JIT]


def test_both_ways_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    case = replace(jit.CASES[1], dtype="float32", batch=1, heads_q=2, heads_kv=2)
    case = replace(case, head_dim=16, head_dim_v=16, seqlen_q=20, seqlen_kv=33)
    monkeypatch.setattr(jit, "make_inputs", lambda case, _: make_inputs(case, np))
    monkeypatch.setattr(jax.dlpack, "from_dlpack", jax.numpy.asarray)
    plain, jitted = jit.plain_pass(case)(), jit.jitted_pass(case)()
    for ours, theirs in zip(plain, jitted, strict=True):
        np.testing.assert_allclose(ours, np.asarray(theirs), rtol=1e-5, atol=1e-5)

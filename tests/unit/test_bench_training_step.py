"""A training step with each attention: what it computes, what is timed, stored and shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import run, tables

jax = pytest.importorskip("jax", reason="JAX is not installed")

from bench import training_step  # noqa: E402
from bench.training_step import FUNCTIONS, Model  # noqa: E402

MODEL = Model(layers=2, width=32, heads=2, batch=2, seqlen=48, vocabulary=96)
OURS, CUDNN, XLA = FUNCTIONS


def test_steps_with_every_attention_that_runs_here_have_one_loss() -> None:
    lines: list[str] = []
    rows = training_step.measure(MODEL, lines.append, rounds=3)
    assert [row["impl"] for row in rows] == [OURS, XLA]
    assert lines[0].startswith(f"left out: {CUDNN}")
    ours, xla = (row["losses"] for row in rows)
    assert ours[0] > ours[1] > ours[2]
    np.testing.assert_allclose(ours, xla, rtol=1e-3)
    assert rows[0]["ratio"] == 1.0
    expected = 1e3 * MODEL.batch * MODEL.seqlen / rows[0]["ms"]
    assert rows[0]["tokens_per_s"] == pytest.approx(expected, rel=1e-2)


def test_another_result_is_no_peer() -> None:
    wrong = {OURS: FUNCTIONS[OURS], "wrong": lambda q, k, v: v}
    with pytest.raises(RuntimeError, match="wrong"):
        training_step.measure(MODEL, print, wrong, rounds=1)


def test_an_error_of_ours_is_no_row() -> None:
    def broken(q: Any, k: Any, v: Any) -> Any:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        training_step.measure(MODEL, print, {OURS: broken}, rounds=1)


def test_the_loss_is_the_cross_entropy_of_the_next_token() -> None:
    """With layers that add nothing, a token's output is its embedding plus position, normalized."""
    weights = dict(training_step.weights_of(MODEL))
    for name in ("out", "down"):
        weights[name] = np.zeros_like(weights[name])
    tokens = np.arange(2 * 49).reshape(2, 49) % MODEL.vocabulary
    found = training_step._loss_of(MODEL, FUNCTIONS[XLA], weights, tokens)
    table, positions = np.asarray(weights["tokens"]), np.asarray(weights["positions"])
    x = table[tokens[:, :-1]] + positions
    x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    logits = x @ table.T
    of_next = np.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    expected = (np.log(np.exp(logits).sum(axis=-1)) - of_next).mean()
    assert float(found) == pytest.approx(expected, rel=2e-3)


def test_the_table_shows_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    assert tables.render(tables.TRAINING_STEP) == ""
    common = {"run": "20261128-000000", "date": "2026-11-28", "gpu": "NVIDIA H200"}
    times = {OURS: [2.0] * 9, XLA: [5.0] * 9}
    rows = [
        {**common, "version": "jax 1", **training_step._row(MODEL, name, times, [3.0, 2.0, 1.0])}
        for name in times
    ]
    (tmp_path / "nvidia-h200-training-step.json").write_text(json.dumps(rows))
    shown = tables.render(tables.TRAINING_STEP)
    assert "NVIDIA H200, jax 1, 2 layers, width 32, 2 heads" in shown
    assert "| 2 | 48 | cuflash | 2.0 | 48,000 | 1.00 |" in shown
    assert "| 2 | 48 | jax.nn, XLA | 5.0 | 19,200 | 2.50 |" in shown

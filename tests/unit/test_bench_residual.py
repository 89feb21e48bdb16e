"""The measurement of float32 residuals, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

import cuflash
from bench import residual, residual_table
from bench.stored import gpu_files


def _ours(kept: str | None) -> Any:
    def gradient(q: Any, k: Any, v: Any, dout: Any) -> Any:
        options: dict[str, Any] = {"backend": "numpy", "residual_dtype": kept}
        return cuflash.attention_vjp(q, k, v, **options)[1](dout)[0]

    return gradient


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setattr(residual, "SHAPE", (1, 64, 1, 16))
    monkeypatch.setattr(residual, "SHIFTS", (0, 64))
    return residual.errors({name: _ours(kept) for name, kept in residual.RESIDUALS.items()})


def test_errors_are_of_dq_and_fall_with_the_residual(rows: list[dict[str, Any]]) -> None:
    found = {(row["shift"], row["impl"]): row["error"] for row in rows}
    assert len(found) == 4
    assert all(0 < error < 0.3 for error in found.values())
    assert found[64, "cuflash, float32 residual"] < found[64, "cuflash"] / 4


def test_the_table_has_a_line_a_shift_and_a_line_a_time(
    rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    common = {"gpu": "GPU", "date": "2026-01-01", "run": "1"}
    sizes = {"head_dim": 64, "seqlen_q": 512, "batch": 2, "heads_q": 16}
    time = {"what": residual.TIMES, "impl": "cuflash", **sizes, "ms": 1.5, "ratio": 1.0}
    stored = [{**common, **row} for row in [*rows, time]]
    monkeypatch.setattr(residual_table, "load", lambda _: stored)
    lines = residual_table.render().splitlines()
    assert sum(line.startswith(("| 0 |", "| 64 |")) for line in lines) == 2
    assert "| cuflash | 64 | 512 | 1.500 | 1.000 |" in lines


def test_its_file_is_not_taken_for_device_times() -> None:
    assert residual_table.load("nvidia-h200-residual.json")
    assert not [path for path in gpu_files() if "residual" in path.stem]

"""First calls: the timed processes, their cache, and the stored rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import cold, run, tables
from bench.cases import Case
from bench.stored import gpu_files

COMMON = {"run": "20261122-000000", "date": "2026-11-22", "gpu": "NVIDIA H200"}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr("cuflash.cuda.available.require_device", lambda: 0)
    monkeypatch.setattr(cold, "common_columns", lambda: COMMON)
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    return tmp_path


def test_each_cache_is_empty_once_and_filled_once(
    device: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def first(case: Case, cache: Path) -> float:
        filled = (cache / "kernel").exists()
        assert filled == bool(list(cache.iterdir()))
        (cache / "kernel").write_text("")
        caches.append(cache)
        return 20.0 if filled else 1500.0

    caches: list[Path] = []
    rows = cold.run_cold(device / "nvidia-h200-cold.json", first)
    assert len(caches) == 2 * cold.TIMES * len(cold.CASES)
    assert all(one == other for one, other in zip(caches[::2], caches[1::2], strict=True))
    assert len(set(caches)) == len(caches) // 2
    assert {(row["compiled_ms"], row["loaded_ms"]) for row in rows} == {(1500.0, 20.0)}
    assert json.loads((device / "nvidia-h200-cold.json").read_text()) == rows
    assert "| fa3 | backward | 128 | 1500 | 20 |" in tables.render(tables.COLD)
    assert gpu_files() == []
    assert "compiled   1500.0 ms, from disk   20.0 ms" in capsys.readouterr().out


def test_nothing_is_shown_before_it_is_measured(device: Path) -> None:
    assert tables.render(tables.COLD) == ""


def test_a_process_has_its_case_and_its_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    child = (
        "import json, os, sys; case = json.loads(sys.argv[1]); "
        "print(case['head_dim'] + len(os.environ['CUPY_CACHE_DIR']))"
    )
    monkeypatch.setattr(cold, "_CHILD", child)
    case = cold.CASES[0]
    assert cold.first_call(case, tmp_path) == case.head_dim + len(str(tmp_path))
    assert Case(**{name: getattr(case, name) for name in cold._FIELDS}) == case
    monkeypatch.setattr(cold, "_CHILD", "raise SystemExit('no device')")
    with pytest.raises(RuntimeError, match="no device"):
        cold.first_call(case, tmp_path)

"""The format of the record of kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import record
from .nvrtc import Built

_ROW = "sm_90-steps-list_blocks-128x128"


@pytest.mark.parametrize("log", ["", "a.cuh(7): warning #128-D: loop is not reachable"])
def test_a_kernel_that_the_compiler_warns_of_is_not_recorded(
    log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    into = tmp_path / "record.json"
    monkeypatch.setattr("sys.argv", ["record", "--architectures", "90", "--into", str(into)])
    monkeypatch.setattr(record, "rows", lambda _: {_ROW: None})
    monkeypatch.setattr(record, "rare_rows", lambda _: {})
    monkeypatch.setattr(record, "nvrtc_version", lambda: "99.0")
    monkeypatch.setattr(record, "build", lambda _: Built(32, 0, 0, 0, log, "", "0" * 16))
    assert record.main() == bool(log)
    assert into.exists() == (not log)
    said = capsys.readouterr().out
    if log:
        assert f"{_ROW}: {log}" in said
    else:
        assert record.read(into).code(_ROW, "99.0") == "0" * 16

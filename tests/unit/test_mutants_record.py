"""How a stored record of all planted bugs changes when some of them run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ..mutants import __main__ as command
from ..mutants.bugs import BUGS
from ..mutants.record import store

_EVERY = ("first", "second", "third")
_OLDER = {
    "ran_on": "the emulator",
    "device_code": "older",
    "since": {"code": "newer", "changed": "a comment"},
    "killed": {"first": "a", "second": "b", "third": "c"},
}
_NEWER = {"ran_on": "the emulator", "device_code": "newer"}


def _stored(folder: Path, seen: dict[str, str], ran: set[str], killed: dict[str, str]) -> Any:
    path = folder / "killed.json"
    path.write_text(json.dumps(_OLDER))
    store(path, seen, ran, killed, _EVERY)
    return json.loads(path.read_text())


@pytest.mark.parametrize("code", ["older", "newer"])
def test_bugs_that_did_not_run_stay(tmp_path: Path, code: str) -> None:
    found = _stored(tmp_path, {**_NEWER, "device_code": code}, {"second"}, {"second": "d"})
    assert found == {**_OLDER, "killed": {"first": "a", "second": "d", "third": "c"}}
    assert list(found["killed"]) == list(_EVERY)


def test_a_bug_that_survives_is_gone_and_a_new_one_is_added(tmp_path: Path) -> None:
    found = _stored(tmp_path, _NEWER, {"second", "new"}, {"new": "e"})
    assert found["killed"] == {"first": "a", "third": "c", "new": "e"}


def test_every_bug_run_on_other_code_begins_anew(tmp_path: Path) -> None:
    found = _stored(tmp_path, _NEWER, {*_EVERY, "new"}, {"first": "f"})
    assert found == {**_NEWER, "killed": {"first": "f"}}


def test_an_account_of_another_device_stays_unless_every_bug_ran(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = {**_NEWER, "ran_on": "a GPU"}
    assert _stored(tmp_path, device, {"first"}, {"first": "g"}) == _OLDER
    assert "killed.json stays: it is of the emulator" in capsys.readouterr().out
    assert _stored(tmp_path, device, {*_EVERY}, {"first": "g"}) == {
        **device,
        "killed": {"first": "g"},
    }


def test_a_new_account_has_what_ran(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "killed.json"
    store(path, _NEWER, {"first"}, {"first": "a"}, _EVERY)
    assert json.loads(path.read_text()) == {**_NEWER, "killed": {"first": "a"}}


def test_the_command_with_only_keeps_the_other_bugs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "killed.json"
    one, other = [bug for bug in BUGS if not bug.needs_gpu][:2]
    path.write_text(json.dumps({**_OLDER, "killed": {one.name: "a", other.name: "b"}}))
    arguments = ["mutants", "--only", one.name, "--record", str(path)]
    monkeypatch.setattr("sys.argv", arguments)
    monkeypatch.setattr(command, "run_tests", lambda tree, tests: (0, ""))
    monkeypatch.setattr(command, "judge", lambda bug: (True, "c"))
    monkeypatch.setattr(command.cuflash, "is_available", lambda: False)
    monkeypatch.setattr(command, "compiler", lambda: "g++")
    monkeypatch.setattr(command, "copy_tree", lambda folder: folder)
    assert command.main() == 0
    found = json.loads(path.read_text())
    assert found == {**_OLDER, "killed": {one.name: "c", other.name: "b"}}

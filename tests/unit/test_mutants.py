"""The planted bugs are where they say, and every one of them is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..mutants.__main__ import judge
from ..mutants.bugs import BUGS, Bug
from ..mutants.record import device_digest, read


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_is_one_edit_that_can_be_made(bug: Bug, root: Path) -> None:
    assert (root / bug.file).read_text().count(bug.find) == 1
    assert bug.find != bug.replace


def test_names_are_unique() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS)


def test_there_are_enough_of_each_kind() -> None:
    in_device_code = [bug for bug in BUGS if bug.needs_gpu]
    assert len(in_device_code) >= 60
    assert len(BUGS) >= 75


def test_every_bug_of_the_device_code_was_killed() -> None:
    """Of this very code: ``python -m tests.mutants`` brings the record up to date."""
    record = read()
    assert {bug.name for bug in BUGS if bug.needs_gpu} <= set(record["killed"])
    assert record["device_code"] == device_digest(), "the device code changed since the record"


@pytest.mark.parametrize(
    "bug", [bug for bug in BUGS if not bug.needs_gpu], ids=lambda bug: bug.name
)
def test_a_bug_of_the_host_code_is_killed(bug: Bug) -> None:
    dead, by = judge(bug)
    assert dead, by

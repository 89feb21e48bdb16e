"""Bugs chosen without knowing the tests: each can be planted, and a record names its test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..mutants.bug import OutsideBug
from ..mutants.outside import OUTSIDE, OUTSIDE_RECORD

_AREAS = ("host", "planning", "shared", "fa3", "numpy", "jax")


@pytest.mark.parametrize("bug", OUTSIDE, ids=lambda bug: bug.name)
def test_a_bug_is_one_edit_that_can_be_made(bug: OutsideBug, root: Path) -> None:
    assert (root / bug.file).read_text().count(bug.find) == 1
    assert bug.find != bug.replace
    assert bug.area in _AREAS
    assert bug.changes


def test_names_are_unique_and_bugs_are_of_every_area() -> None:
    assert len({bug.name for bug in OUTSIDE}) == len(OUTSIDE) >= 40
    assert {bug.area for bug in OUTSIDE} == set(_AREAS)


def test_the_record_has_every_bug_and_nothing_else() -> None:
    record = json.loads(OUTSIDE_RECORD.read_text())
    killed, needs_gpu = record["killed"], record["needs_gpu"]
    assert killed.keys() | needs_gpu.keys() == {bug.name for bug in OUTSIDE}
    assert not killed.keys() & needs_gpu.keys()
    assert all(reason.strip() for reason in needs_gpu.values())


def test_the_tests_of_the_record_are_there(root: Path) -> None:
    for name, test in json.loads(OUTSIDE_RECORD.read_text())["killed"].items():
        path, _, function = test.partition("::")
        assert f"def {function.partition('[')[0]}(" in (root / path).read_text(), name
        assert not path.startswith("tests/device/"), f"{name}: {test} needs a GPU"

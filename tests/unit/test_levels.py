"""Which tests the quick set, a default run and CI have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cuflash.planning.plan import ALGORITHMS

from ..emulator.rows import ROWS
from ..levels import LONG, QUICK, TURNS, days_of_turn, is_long, is_quick

_NAMED = QUICK.read_text("utf-8").splitlines()
_KERNELS = "tests/emulator/test_device_code.py::test_against_float64"


def _text(root: Path, name: str) -> str:
    return (root / name).read_text("utf-8")


@pytest.mark.parametrize("name", _NAMED)
def test_what_the_quick_set_names_is_there(name: str, root: Path) -> None:
    file, _, test = name.partition("::")
    text = _text(root, file)
    assert not test or f"def {test.partition('[')[0]}(" in text


def test_the_quick_set_names_nothing_twice() -> None:
    assert len(set(_NAMED)) == len(_NAMED)
    files = {name for name in _NAMED if "::" not in name}
    assert not [name for name in _NAMED if "::" in name and name.partition("::")[0] in files]


def test_the_quick_set_runs_both_passes_of_every_algorithm_on_the_emulator() -> None:
    """``test_against_float64`` runs both passes of each row."""
    rows = {f"{_KERNELS}[{row.name}]": row.algorithm for row in ROWS}
    assert {rows[name] for name in _NAMED if name.startswith(_KERNELS)} == set(ALGORITHMS)


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_the_quick_set_runs_both_algorithms_of_the_numpy_backend(operation: str) -> None:
    kind = re.compile(rf".*::test_{operation}\[numpy-(fa\d)-.*\]")
    found = {match[1] for match in map(kind.fullmatch, _NAMED) if match}
    assert found == {"fa1", "fa2"}


class _Item:
    """A test as ``is_long`` sees it: its name and its markers."""

    def __init__(self, nodeid: str, *markers: str) -> None:
        self.nodeid, self.markers = nodeid, markers

    def get_closest_marker(self, name: str) -> Any:
        return name if name in self.markers else None


@pytest.mark.parametrize(
    ("test", "markers", "long"),
    [
        ("tests/unit/test_house.py::test_files_are_short", (), False),
        ("tests/unit/test_house.py::test_files_are_short", ("long",), False),  # in the quick set
        ("tests/unit/test_merging.py::test_any", (), False),
        ("tests/unit/test_merging.py::test_any", ("long",), True),
        ("tests/unit/test_merging.py::test_any[a]", ("in_turns",), True),
        ("tests/unit/test_jax_bias_divided.py::test_any", (), True),
        ("tests/emulator/test_sinks.py::test_any[fa1]", (), True),
        (f"{_KERNELS}[{ROWS[0].name}]", (), False),
        (f"{_KERNELS}[{ROWS[1].name}]", (), True),
    ],
)
def test_a_default_run_leaves_what_is_long_to_ci(
    test: str, markers: tuple[str, ...], long: bool
) -> None:
    assert is_long(_Item(test, *markers)) == long  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("test", "days"),
    [
        ("tests/unit/test_kit_checks.py::test_any", 6),
        ("tests/unit/test_jax_mask_divided.py::test_any", 3),
        ("tests/unit/test_jax_windows.py::test_any", 1),  # in a default run
        ("tests/property/test_sinks.py::test_any[numpy-fa1]", 5),
        ("tests/property/test_against_float64.py::test_forward[numpy-fa1]", 1),
        ("tests/emulator/test_graphs.py::test_any", 2),
    ],
)
def test_long_tests_of_some_files_take_turns(test: str, days: int) -> None:
    assert days_of_turn(_Item(test)) == days  # type: ignore[arg-type]


def test_a_file_or_a_function_in_the_quick_set_is_there_with_all_its_tests() -> None:
    assert is_quick("tests/unit/test_house.py::test_files_are_short")
    assert not is_quick("tests/unit/test_houses.py::test_files_are_short")


def _matches(root: Path) -> Iterator[tuple[str, int]]:
    for pattern in (*LONG, *TURNS):
        yield pattern, len(list(root.glob(pattern)))


def test_every_kind_of_long_file_is_there(root: Path) -> None:
    assert all(count for _, count in _matches(root)), dict(_matches(root))


def test_ci_runs_the_long_tests_too(root: Path) -> None:
    """CI runs README's command with all tests. README and CONTRIBUTING name the quick set."""
    script = _text(root, ".ci/run")
    assert "tests=$(readme_command 'pytest')" in script
    assert """ -c "$tests -m 'long or not long'"\n""" in script
    quick = "python -m pytest -n auto --dist worksteal @tests/quick"
    assert f"\n{quick}\n" in _text(root, "README.md")
    assert f"`{quick}`" in _text(root, "CONTRIBUTING.md")

"""Environment variables: read in one place, listed in the guide."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from cuflash.config import VARIABLES, Environment
from cuflash.errors import ArgumentValueError


def test_every_field_has_a_variable() -> None:
    assert set(VARIABLES) == {field.name for field in dataclasses.fields(Environment)}


def test_unset_and_empty_are_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, _ in VARIABLES.values():
        monkeypatch.setenv(name, "")
    assert Environment.read() == Environment()


def test_values_are_read_when_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFLASH_BACKEND", "NumPy")
    monkeypatch.setenv("CUFLASH_CPU_CACHE", "4096")
    monkeypatch.setenv("CUFLASH_JITTER", "1")
    assert Environment.read() == Environment(backend="numpy", cpu_cache=4096, jitter=True)
    monkeypatch.setenv("CUFLASH_JITTER", "0")
    assert Environment.read() == Environment(backend="numpy", cpu_cache=4096)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUFLASH_BACKEND", "gpu"),
        ("CUFLASH_CPU_CACHE", "lots"),
        ("CUFLASH_CPU_CACHE", "0"),
        ("CUFLASH_CPU_CACHE", "-1"),
        ("CUFLASH_JITTER", "yes"),
        ("CUFLASH_JITTER", "2"),
        ("CUFLASH_JITTER", "-1"),
    ],
)
def test_nonsense_names_the_variable(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentValueError, match=name):
        Environment.read()


def test_no_other_module_reads_the_environment_for_itself(root: Path) -> None:
    for path in (root / "cuflash").rglob("*.py"):
        names = set(re.findall(r"CUFLASH_[A-Z_]+", path.read_text()))
        if path.name != "config.py":
            spoken_of = {"CUFLASH_CUDA_SRC", "CUFLASH_CPU_CACHE"}  # docstrings name these
            assert names <= spoken_of, path
            assert not re.search(r"environ(\.get)?[\[(]\s*[\"']CUFLASH", path.read_text()), path


def test_the_guide_lists_them_all(root: Path) -> None:
    text = (root / "docs/guide/performance.md").read_text("utf-8")
    listed = set(re.findall(r"\| `(CUFLASH_[A-Z_]+)` \|", text))
    assert listed == {name for name, _ in VARIABLES.values()}

"""Copies of the tree with a bug in them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from .bug import Bug, OutsideBug
from .record import ROOT

__all__ = ["copy_tree", "environment_of", "plant"]

#: The files and folders that a copy of the tree needs.
PARTS = ("cuflash", "cuda_src", "tests", "pyproject.toml", "README.md", "docs", "bench")


def plant(bug: Bug | OutsideBug, tree: Path) -> None:
    """Make the edit in a copy of the tree."""
    path = tree / bug.file
    text = path.read_text()
    if text.count(bug.find) != 1:
        raise SystemExit(f"{bug.name}: {bug.find!r} stands {text.count(bug.find)} times")
    path.write_text(text.replace(bug.find, bug.replace))
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink()


def copy_tree(into: Path) -> Path:
    """Copy the files that the tests need, with the bytecode of imported modules."""
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            ignored = shutil.ignore_patterns("*.pyc.*", ".hypothesis")  # files being written
            shutil.copytree(source, into / part, ignore=ignored)
        elif source.exists():
            shutil.copy(source, into / part)
    return into


def environment_of(tree: Path) -> dict[str, str]:
    """The environment of a process that runs the copy and nothing else."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    for variable in ("CUFLASH_CUDA_SRC", "CUFLASH_JITTER"):
        environment.pop(variable, None)
    return environment

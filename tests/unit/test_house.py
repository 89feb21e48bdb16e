"""The rules of the house that a program can check: sizes of files and functions, and asm."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

MOST_LINES = {".py": 300, ".cu": 399, ".cuh": 399}
#: The lines of a function. Its docstring does not count, nor do keyword-only parameters of a
#: public function: each of them has a line, and every feature adds one.
MOST_FUNCTION_LINES = 39


def _python(root: Path) -> Iterator[Path]:
    for folder in ("cuflash", "tests", "bench", "tools", "examples"):
        yield from sorted((root / folder).rglob("*.py"))


def _device(root: Path) -> Iterator[Path]:
    yield from sorted((root / "cuda_src").rglob("*.cu*"))


def _function_lines(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if ast.get_docstring(node) is not None:
            said = node.body[0]
            lines -= (said.end_lineno or said.lineno) - said.lineno + 1
        if not node.name.startswith("_"):
            lines -= len({argument.lineno for argument in node.args.kwonlyargs} - {node.lineno})
        yield node.name, lines


def test_files_are_short(root: Path) -> None:
    lengths = {p: len(p.read_text("utf-8").splitlines()) for p in (*_python(root), *_device(root))}
    long = [f"{p.relative_to(root)}: {n}" for p, n in lengths.items() if n > MOST_LINES[p.suffix]]
    assert not long, long


def test_functions_are_short(root: Path) -> None:
    long = [
        f"{path.relative_to(root)}: {name} has {lines} lines"
        for path in _python(root)
        for name, lines in _function_lines(path)
        if lines > MOST_FUNCTION_LINES
    ]
    assert not long, long


def test_the_ruler_measures_code_and_not_docstrings(tmp_path: Path) -> None:
    path = tmp_path / "two.py"
    path.write_text('def two():\n    """One\n\n    more.\n    """\n    return 2\n')
    assert list(_function_lines(path)) == [("two", 2)]


def test_the_ruler_leaves_out_the_keywords_of_public_functions(tmp_path: Path) -> None:
    path = tmp_path / "two.py"
    text = "def {}(\n    a,\n    *,\n    b,\n    c,\n):\n    return 2\n"
    path.write_text(text.format("two") + text.format("_two") + "def three(*, d): return 3\n")
    assert list(_function_lines(path)) == [("two", 5), ("_two", 7), ("three", 1)]


def test_asm_stands_only_in_ptx(root: Path) -> None:
    outside = [p for p in _device(root) if (root / "cuda_src" / "ptx") not in p.parents]
    assert outside
    assert not [p for p in outside if re.search(r"\basm\b", p.read_text("utf-8"))]

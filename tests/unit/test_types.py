"""A type checker's view of the public functions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_PROGRAM = """
from typing import Any
import cuflash

def program(q: Any, flag: bool) -> None:
    reveal_type(cuflash.attention(q, q, q))
    reveal_type(cuflash.attention(q, q, q, return_lse=False, layout="shd", sinks=q))
    reveal_type(cuflash.attention(q, q, q, return_lse=True, window_size=(3, None)))
    reveal_type(cuflash.attention(q, q, q, return_lse=flag))
    reveal_type(cuflash.attention_vjp(q, q, q))
    reveal_type(cuflash.attention_vjp(q, q, q, return_lse=True, wrt=("sinks", "q"), sinks=q))
    reveal_type(cuflash.attention_vjp(q, q, q, wrt=("alibi_slopes",), alibi_slopes=q))
    reveal_type(cuflash.attention_vjp(q, q, q, wrt=("bias", "q"), bias=q))
    out, pullback = cuflash.attention_vjp(q, q, q, return_lse=flag)
    reveal_type(pullback(out))
    reveal_type(cuflash.attention_backward(q, q, q, q, q, q, wrt=["k", "v"]))
"""
_REVEALED = [
    "Any",
    "Any",
    "tuple[Any, Any]",
    "Any",
    "tuple[Any, cuflash.api.pullback.Pullback]",
    "tuple[tuple[Any, Any], cuflash.api.pullback.Pullback]",
    "tuple[Any, cuflash.api.pullback.Pullback]",
    "tuple[Any, cuflash.api.pullback.Pullback]",
    "tuple[Any, ...]",
    "tuple[Any, ...]",
]
_WRONG = """
import cuflash

def program(q: object) -> None:
    cuflash.attention(q, q, q, layout="sbhd")
    cuflash.attention(q, q, q, algorithm="fa4")
    cuflash.attention(q, q, q, backend="rocm")
    cuflash.attention(q, q, q, window_size=3)
    cuflash.attention_backward(q, q, q, q, q, q, wrt=("q", "mask"))
    cuflash.attention_vjp(q, q, q, wrt=("x",))
    cuflash.prepare(q, q, q, layout="sbhd")
    cuflash.explain(q, q, q, wrt=("out",))
"""


def _checked(program: str, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    api = pytest.importorskip("mypy.api", reason="mypy is not installed")
    monkeypatch.chdir(root)
    path = tmp_path / "program.py"
    path.write_text(program)
    said, failed, _ = api.run(["--strict", "--config-file", "pyproject.toml", str(path)])
    assert not failed, failed
    return str(said)


def test_results_have_the_types_that_their_keywords_give(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = _checked(_PROGRAM, tmp_path, root, monkeypatch)
    assert "error" not in said
    assert re.findall(r'Revealed type is "(.+)"', said) == _REVEALED


def test_what_no_call_takes_is_an_error(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = _checked(_WRONG, tmp_path, root, monkeypatch)
    wrong = {number for number, line in enumerate(_WRONG.splitlines(), 1) if "cuflash." in line}
    assert {int(line) for line in re.findall(r"program\.py:(\d+): error", said)} == wrong

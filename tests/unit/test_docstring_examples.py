"""The examples in the docstrings of public functions run, and give what they show."""

from __future__ import annotations

import doctest
import inspect
from typing import Any

import pytest

import cuflash

#: Functions and classes without an example in their docstring: classes of results, and functions
#: that the pages of docs show (see test_documents.py).
WITHOUT = {
    *("Explanation", "Info", "Prepared", "Pullback"),
    *("append_kv", "attention", "attention_backward", "attention_vjp", "attention_with_kvcache"),
    *("is_available", "prepare"),
}


def _public() -> dict[str, Any]:
    """The public functions and classes except errors, and the method ``BlockMask.from_csr``."""
    found = {name: getattr(cuflash, name) for name in cuflash.__all__}
    found = {
        name: value
        for name, value in found.items()
        if callable(value) and not (inspect.isclass(value) and issubclass(value, Exception))
    }
    return {**found, "BlockMask.from_csr": cuflash.BlockMask.from_csr}


PUBLIC = _public()


def check_examples(name: str, function: Any) -> None:
    """The docstring of a function has an example, and all examples give what they show."""
    text = inspect.getdoc(function) or ""
    test = doctest.DocTestParser().get_doctest(text, {name: function}, name, None, None)
    assert test.examples, f"{name} has no example"
    report: list[str] = []
    runner = doctest.DocTestRunner()
    runner.run(test, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


@pytest.mark.parametrize("name", sorted(set(PUBLIC) - WITHOUT))
def test_an_example_gives_what_it_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFLASH_BACKEND", "numpy")
    check_examples(name, PUBLIC[name])


def test_what_has_no_example_is_listed() -> None:
    having = {name for name, value in PUBLIC.items() if ">>>" in (inspect.getdoc(value) or "")}
    assert set(PUBLIC) - having == WITHOUT

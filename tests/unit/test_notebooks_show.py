"""The tables that notebooks show for objects that users print."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any, cast

import pytest

import cuflash
from cuflash.arrays.spec import TensorSpec
from cuflash.html_table import html_table
from cuflash.info import Texts
from cuflash.planning.plan import Plan

SHAPE = (1, 128, 2, 64)


class _Cells(HTMLParser):
    """The rows of a table as texts; every tag must be closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.rows[-1][-1] += data


def _rows(shown: Any) -> list[tuple[str, str]]:
    cells = _Cells()
    cells.feed(shown._repr_html_())
    cells.close()
    assert not cells.open
    return [(name, value) for name, value in cells.rows]


def _explanation() -> cuflash.Explanation:
    return cuflash.explain(SHAPE, SHAPE, SHAPE, dtype="float32", backend="numpy")


@pytest.mark.parametrize("shown", [_explanation(), cuflash.info()], ids=["explain", "info"])
def test_a_table_has_what_is_printed(shown: Any) -> None:
    printed = [re.sub(" +", " ", line) for line in str(shown).splitlines()]
    assert [re.sub(" +", " ", f"{name} {value}") for name, value in _rows(shown)] == printed


def test_values_are_escaped() -> None:
    text = '<script>alert("1 & 2")</script>'
    table = html_table([(text, text)])
    assert "<script" not in table
    assert '"1' not in table
    assert ("sys.executable", text) in _rows(
        replace(cuflash.info(), environment=Texts({"sys.executable": text}))
    )
    assert ("tile", f"64 queries x 64 keys: {text}") in _rows(
        replace(_explanation(), reason=text, block_q=64, block_kv=64)
    )


def test_a_prepared_call_shows_its_plan_and_its_arrays() -> None:
    """A text replaces the plan, which would need a device."""
    prepared = cuflash.Prepared.__new__(cuflash.Prepared)
    spec = TensorSpec(SHAPE, "float16", (1,) * 4, 2, 0)
    planned = SimpleNamespace(
        plan=cast("Plan", "a plan of <fa3>"), workspace_bytes=4096, tensors={"q": spec, "k": spec}
    )
    prepared._planned = cast("Any", planned)
    assert _rows(prepared) == [
        ("plan", "a plan of <fa3>"),
        ("workspace", "4,096 bytes"),
        ("tensors", f"q float16 {SHAPE}, k float16 {SHAPE}"),
    ]

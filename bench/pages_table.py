"""The table of caches in pages, beside the same caches in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .lines import of_turns, timed_how
from .markdown import table
from .stored import Row, problem

__all__ = ["SETS", "render"]

#: Sets of cases that have such a table.
SETS = ("pages",)


def render(rows: Sequence[Row]) -> str:
    """A line for each case, from the protocol ``turns`` if it was run; empty without rows."""
    rows = of_turns(rows)
    sizes = sorted(filter(None, {_page_size(row) for row in rows}), reverse=True)
    if not sizes:
        return ""
    first = rows[0]
    how = timed_how(first["protocol"])
    caption = (
        f"{first['gpu']}, {first['dtype']}, `attention_with_kvcache`, one query a sequence, pages "
        f"in any order in one pool, GB/s of q, k, v and the output, each call on another copy of "
        f"k and v, {how}, {first['date']}"
    )
    header = ["head_dim", "heads", "batch x keys", "in one piece"]
    for size in sizes:
        header += [f"pages of {size}", "of the speed in one piece"]
    return f"{caption}\n\n" + table(header, [_line(same, sizes) for same in _lines(rows)])


def _page_size(row: Row) -> int:
    """Keys of a page; 0 for caches in one piece."""
    return row["options"].get("page_size") or 0


def _lines(rows: Sequence[Row]) -> list[dict[int, Row]]:
    """The rows of every case by page size."""
    found: dict[tuple[Any, ...], dict[int, Row]] = {}
    for row in rows:
        options = {**row["options"], "page_size": None}
        found.setdefault(problem({**row, "options": options}), {})[_page_size(row)] = row
    return list(found.values())


def _line(same: dict[int, Row], sizes: Sequence[int]) -> list[str]:
    row = next(iter(same.values()))
    cells = [str(row["head_dim"]), f"{row['heads_q']}/{row['heads_kv']}"]
    cells += [f"{row['batch']} x {row['seqlen_kv']}", _rate(same.get(0))]
    for paged in map(same.get, sizes):
        ratio = f"{paged['ratio']:.3f}" if paged and paged["ratio"] else ""
        cells += [_rate(paged), ratio]
    return cells


def _rate(row: Row | None) -> str:
    return f"{row['gb_per_s']:.0f}" if row else ""

"""The table of decoding: the speed of reading caches, for both calls and for the peers."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean
from typing import Any

from .lines import main_row, of_turns, plain_row, problems, timed_how
from .markdown import table
from .stored import Row, implementations, label

__all__ = ["SETS", "render"]

#: Sets of cases that have such a table.
SETS = ("decode",)
#: Our two calls, which are timed side by side.
_CALLS = ("attention", "attention_with_kvcache")


def render(rows: Sequence[Row]) -> str:
    """A line for each case, from the protocol ``turns`` if it was run; empty without rows."""
    rows = of_turns(rows)
    if not rows:
        return ""
    first = rows[0]
    how = timed_how(first["protocol"])
    caption = (
        f"{first['gpu']}, {first['dtype']}, one query a sequence, GB/s of q, k, v and the output, "
        f"each call on another copy of k and v, {how}, {first['date']}"
    )
    peers = [name for name in implementations(rows) if not name.startswith("cuflash")]
    lines = [_line(same, peers) for same in problems(rows)]
    header = ["head_dim", "heads", "batch x keys", *(f"`{call}`" for call in _CALLS), *peers]
    header += ["ratio to the best other", "at least", "with `cache_seqlens`", "at least"]
    return f"{caption}\n\n{_means(rows)}\n\n" + table(header, lines)


def _both(same: Sequence[Row]) -> tuple[Row | None, Row]:
    """The rows of ``attention`` and of the call for caches."""
    return plain_row(same), main_row(same)


def _line(same: Sequence[Row], peers: Sequence[str]) -> list[str]:
    cached = main_row(same)
    rates = {label(row): f"{row['gb_per_s']:.0f}" for row in same if not row["sources"]}
    heads = dict.fromkeys((str(cached["heads_q"]), str(cached["heads_kv"])))
    cells = [str(cached["head_dim"]), "/".join(heads)]
    cells.append(f"{cached['batch']} x {cached['seqlen_kv']}")
    cells += [f"{row['gb_per_s']:.0f}" if row else "" for row in _both(same)]
    cells += [rates.get(name, "") for name in peers]
    return cells + [_ratio(row, name) for row in _both(same) for name in ("ratio", "ratio_low")]


def _ratio(row: Row | None, name: str) -> str:
    return f"{row[name]:.2f}" if row and row[name] else ""


def _means(rows: Sequence[Row]) -> str:
    """The geometric mean and the worst of the ratios of each of the two calls."""
    pairs: list[Any] = [_both(same) for same in problems(rows)]
    found = []
    for call, of_call in zip(_CALLS, zip(*pairs, strict=True), strict=True):
        ratios = [row["ratio"] for row in of_call if row and row["ratio"]]
        if ratios:
            found.append(
                f"`{call}` is {geometric_mean(ratios):.2f} times as fast as the best other "
                f"(geometric mean of {len(ratios)}), worst {min(ratios):.2f}"
            )
    return "; ".join(found) + "." if found else "Nothing else was timed."

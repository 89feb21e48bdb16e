"""The table of float8 caches, beside the same numbers in 16 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .lines import of_turns, timed_how
from .markdown import table
from .stored import Row, problem

__all__ = ["SETS", "render"]

#: Sets of cases that have such a table.
SETS = ("decode-float8",)


def render(rows: Sequence[Row]) -> str:
    """A line for each case, from the protocol ``turns`` if it was run; empty without rows."""
    rows = of_turns(rows)
    if not rows:
        return ""
    first = rows[0]
    how = timed_how(first["protocol"])
    caption = (
        f"{first['gpu']}, {first['dtype']} queries, `attention_with_kvcache`, one query a "
        f"sequence, GB/s of q, the caches and the output, each call on another copy of the "
        f"caches, {how}, {first['date']}"
    )
    header = ["head_dim", "heads", "batch x keys", "16 bits", "float8"]
    header += ["times as fast as 16 bits", "at least"]
    return f"{caption}\n\n" + table(header, [_line(same) for same in _lines(rows)])


def _lines(rows: Sequence[Row]) -> list[dict[bool, Row]]:
    """The rows of every case, by whether their caches are float8."""
    found: dict[tuple[Any, ...], dict[bool, Row]] = {}
    for row in rows:
        options = {**row["options"], "float8": None}
        same = found.setdefault(problem({**row, "options": options}), {})
        same[bool(row["options"].get("float8"))] = row
    return list(found.values())


def _line(same: dict[bool, Row]) -> list[str]:
    row, plain = same[True], same.get(False)
    heads = dict.fromkeys((str(row["heads_q"]), str(row["heads_kv"])))
    cells = [str(row["head_dim"]), "/".join(heads), f"{row['batch']} x {row['seqlen_kv']}"]
    cells += [f"{one['gb_per_s']:.0f}" if one else "" for one in (plain, row)]
    return cells + [f"{row[n]:.2f}" if row[n] else "" for n in ("ratio", "ratio_low")]

"""Lines of tables: the rows of one case, and what stands first in each line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .cases import mask_text
from .lengths import equal_entries
from .stored import Row, has_extras, label, problem

__all__ = [
    "hidden_by",
    "main_row",
    "of_the_plain_call",
    "of_turns",
    "place",
    "plain_row",
    "problems",
    "timed_how",
]


def of_turns(rows: Sequence[Row]) -> list[Row]:
    """The rows of the protocol ``turns``; all of them if there are none."""
    return [row for row in rows if row["protocol"] == "turns"] or list(rows)


def timed_how(protocol: str) -> str:
    """A protocol in the words of captions."""
    return "taking turns" if protocol == "turns" else "each after a rest"


def place(row: Row) -> list[str]:
    """Where in a grid of problems a row stands."""
    return [
        _pair(row["head_dim"], row["head_dim_v"]),
        _pair(row["batch"] * row["heads_q"], row["batch"] * row["heads_kv"]),
        _pair(row["seqlen_q"], row["seqlen_kv"]),
        hidden_by(row),
    ]


def hidden_by(row: Row) -> str:
    """What hides keys, and lengths of packed sequences, in words."""
    options = row["options"]
    hidden = mask_text(row["causal"], *map(options.get, ("window_size", "mask", "block_mask")))
    return f"{hidden}, {options['lengths']}" if options.get("lengths") else hidden


def _pair(of_q: int, of_kv: int) -> str:
    """A number of the queries, and that of the keys or values where it is another one."""
    return f"{of_q}" if of_q == of_kv else f"{of_q}/{of_kv}"


def problems(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of every problem that ours was timed on, in the order they were stored.

    A call without extras is of the line of the call with them that it follows, if there is one.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    line: tuple[Any, ...] = ()
    for row in rows:
        *apart, extras = problem(_beside(row))
        if has_extras(row) or line[:-1] != tuple(apart):
            line = (*apart, extras)
        groups.setdefault(line, []).append(row)
    return [same for same in groups.values() if any(row["sources"] for row in same)]


def _beside(row: Row) -> Row:
    """Of a causal mask in an array the row that stands in the line of ``causal=True``.

    Of packed sequences of one length that of a batch.
    """
    entries = equal_entries(row["options"].get("lengths"))
    if entries:
        rows = {name: row[name] // entries for name in ("seqlen_q", "seqlen_kv")}
        return {**row, **rows, "batch": entries}
    return {**row, "causal": True} if row["options"].get("mask") == "causal" else row


def main_row(rows: Sequence[Row]) -> Row:
    """Our row of a problem: the newest generation's, with its extra if there is one."""
    ours = [row for row in rows if row["sources"]]
    return max(ours, key=lambda row: (has_extras(row), label(row)))


def plain_row(rows: Sequence[Row]) -> Row | None:
    """Our row of the same problem without extras, where another one has them."""
    ours = [row for row in rows if row["sources"]]
    if not any(map(has_extras, ours)):
        return None
    return next((row for row in ours if not has_extras(row)), None)


def of_the_plain_call(rows: Sequence[Row]) -> str:
    """The speed with an extra over that without, whose own ratio is the other way round."""
    plain = plain_row(rows)
    return f"{1 / plain['ratio']:.3f}" if plain and plain["ratio"] else ""

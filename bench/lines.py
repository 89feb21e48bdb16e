"""Lines of tables: the rows of one case, and the first cells of each line."""

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
    """The rows of the protocol ``turns``; all rows if that protocol has none."""
    return [row for row in rows if row["protocol"] == "turns"] or list(rows)


def timed_how(protocol: str) -> str:
    """The name of a protocol in captions."""
    return "taking turns" if protocol == "turns" else "each after a rest"


def place(row: Row) -> list[str]:
    """The position of a row in a grid of problems."""
    return [
        _pair(row["head_dim"], row["head_dim_v"]),
        _pair(row["batch"] * row["heads_q"], row["batch"] * row["heads_kv"]),
        _pair(row["seqlen_q"], row["seqlen_kv"]),
        hidden_by(row),
    ]


def hidden_by(row: Row) -> str:
    """A description of what hides keys, and of lengths of packed sequences."""
    options = row["options"]
    hidden = mask_text(row["causal"], *map(options.get, ("window_size", "mask", "block_mask")))
    return f"{hidden}, {options['lengths']}" if options.get("lengths") else hidden


def _pair(of_q: int, of_kv: int) -> str:
    """One number if queries and keys (or values) have the same one, else both."""
    return f"{of_q}" if of_q == of_kv else f"{of_q}/{of_kv}"


def problems(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of every problem on which ours was timed, in the order of storage.

    A call without extras belongs to the line of the preceding call with extras, if there is one.
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
    """A row in the terms of its plain call.

    A causal mask in an array becomes ``causal=True``, and packed sequences of one length become a
    batch.
    """
    entries = equal_entries(row["options"].get("lengths"))
    if entries:
        rows = {name: row[name] // entries for name in ("seqlen_q", "seqlen_kv")}
        return {**row, **rows, "batch": entries}
    return {**row, "causal": True} if row["options"].get("mask") == "causal" else row


def main_row(rows: Sequence[Row]) -> Row:
    """Our row of a problem: that of the newest generation, with the extra if a row has one."""
    ours = [row for row in rows if row["sources"]]
    return max(ours, key=lambda row: (has_extras(row), label(row)))


def plain_row(rows: Sequence[Row]) -> Row | None:
    """Our row of the same problem without extras, if another row has them."""
    ours = [row for row in rows if row["sources"]]
    if not any(map(has_extras, ours)):
        return None
    return next((row for row in ours if not has_extras(row)), None)


def of_the_plain_call(rows: Sequence[Row]) -> str:
    """The speed with an extra divided by the speed without it; the stored ratio is the inverse."""
    plain = plain_row(rows)
    return f"{1 / plain['ratio']:.3f}" if plain and plain["ratio"] else ""

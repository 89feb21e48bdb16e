"""The tables of features that change scores: calls with a feature beside the plain calls."""

from __future__ import annotations

from collections.abc import Sequence

from .lines import (
    main_row,
    of_the_plain_call,
    of_turns,
    place,
    plain_row,
    problems,
    timed_how,
)
from .markdown import table
from .stored import Row, label

__all__ = ["SETS", "render"]

#: Sets of cases that have such a table.
SETS = ("features-elsewhere", "features-elsewhere-backward")


def render(rows: Sequence[Row]) -> str:
    """A line for each generation, width and feature, from the protocol ``turns`` if it was run."""
    rows = of_turns(rows)
    if not rows:
        return ""
    first = rows[0]
    how = timed_how(first["protocol"])
    caption = f"{first['gpu']}, {first['dtype']}, {first['op']}, TFLOP/s, {how}, {first['date']}"
    header = ["head_dim", "batch · heads", "seqlen", "mask", "call", "with it", "without"]
    header += ["of the call without"]
    lines = problems(rows)
    peers = any(main_row(same)["ratio"] for same in lines)
    header += ["ratio to the best other", "at least"] if peers else []
    return f"{caption}\n\n" + table(header, [_line(same, peers) for same in lines])


def _line(same: Sequence[Row], peers: bool) -> list[str]:
    ours, plain = main_row(same), plain_row(same)
    rates = [f"{row['tflops']:.0f}" if row else "" for row in (ours, plain)]
    others = ["", ""]
    if ours["ratio"]:
        others = [f"{ours['ratio']:.2f}", f"{ours['ratio_low']:.2f}"]
    cells = [*place(ours), label(ours), *rates, of_the_plain_call(same)]
    return cells + (others if peers else [])

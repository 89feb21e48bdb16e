"""Ratios of several runs taken together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from .stored import Row, label, problem

__all__ = ["pooled", "summary"]


def _mean(values: Iterable[float]) -> float:
    """The geometric mean."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


_Key = tuple[str, str, str, str]


def pooled(rows: Sequence[Row]) -> dict[_Key, dict[tuple[object, ...], float]]:
    """By generation, pass, dtype and protocol: of every problem the mean of our ratio over runs.

    A ratio is the one to the best other implementation of its run.
    """
    ratios: dict[_Key, dict[tuple[object, ...], list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in rows:
        if row["impl"] == "cuflash" and row["ratio"]:
            key = (label(row), row["op"], row["dtype"], row["protocol"])
            ratios[key][problem(row)].append(row["ratio"])
    return {key: {p: _mean(of) for p, of in cells.items()} for key, cells in ratios.items()}


def summary(rows: Sequence[Row]) -> list[str]:
    """A line for each pass, dtype and protocol, and one for each length and width in it."""
    lines = []
    for key, cells in pooled(rows).items():
        lines.append(
            f"{' '.join(key)}: {_mean(cells.values()):.3f} times the best other "
            f"(geometric mean of {len(cells)}), worst {min(cells.values()):.3f}"
        )
        named = {row_problem: _place(rows, row_problem) for row_problem in cells}
        for what in ("seqlen_q", "head_dim"):
            for value in sorted({place[what] for place in named.values()}):
                some = [cells[p] for p, place in named.items() if place[what] == value]
                lines.append(f"  {what} {value}: {_mean(some):.3f}, worst {min(some):.3f}")
    return lines


def _place(rows: Sequence[Row], wanted: tuple[object, ...]) -> Row:
    return next(row for row in rows if problem(row) == wanted)

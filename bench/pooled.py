"""Ratios of several runs taken together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import geometric_mean

from .stored import Row, kind, label, problem

__all__ = ["pooled", "summary"]

_Key = tuple[str, str, str, str, str]
_Problem = tuple[object, ...]


def pooled(rows: Sequence[Row]) -> dict[_Key, dict[_Problem, float]]:
    """Our mean ratio over runs for every problem, by generation, pass, dtype, protocol and kind.

    A ratio compares our speed with the best other implementation in the same run.
    """
    ratios: dict[_Key, dict[_Problem, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["impl"] == "cuflash" and row["ratio"]:
            key = (label(row), row["op"], row["dtype"], row["protocol"], kind(row))
            ratios[key][problem(row)].append(row["ratio"])
    return {
        key: {p: geometric_mean(of) for p, of in cells.items()} for key, cells in ratios.items()
    }


def summary(rows: Sequence[Row]) -> list[str]:
    """A line for each pass, dtype and protocol, then one for each of its lengths and widths."""
    a_row = {problem(row): row for row in rows}
    lines = []
    for key, cells in pooled(rows).items():
        name = " ".join(filter(None, key))
        lines.append(
            f"{name}: {geometric_mean(cells.values()):.3f} times the best other "
            f"(geometric mean of {len(cells)}), worst {min(cells.values()):.3f}"
        )
        for axis in ("seqlen_q", "head_dim"):
            lines += _along(axis, cells, a_row)
    return lines


def _along(axis: str, cells: Mapping[_Problem, float], a_row: Mapping[_Problem, Row]) -> list[str]:
    some = defaultdict(list)
    for of, ratio in cells.items():
        some[a_row[of][axis]].append(ratio)
    return [
        f"  {axis} {value}: {geometric_mean(ratios):.3f}, worst {min(ratios):.3f}"
        for value, ratios in sorted(some.items())
    ]

"""The table of FlashAttention-3 beside ours, both under ``jax.jit``."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

from .lines import hidden_by
from .markdown import table
from .stored import Row, latest, load, of_set

__all__ = ["GRID", "MODELS", "point_of", "ratios", "render", "render_sets"]

_OURS = "cuflash"
#: Sets of cases without features, each timed in a run of its own.
GRID, MODELS = ("fa3", "fa3-backward"), ("models", "models-backward")

#: Pass, head_dim, seqlen and whether the mask is causal: a point of the grid.
Point = tuple[str, int, int, bool]


def render(packed: bool = False) -> str:
    """A line for each case of the last run, and the mean of each pass; empty without rows.

    Packed sequences and windows have separate runs; ``packed`` selects one of the two.
    """
    option = "lengths" if packed else "window_size"
    stored = _stored()
    runs = {row["run"] for row in stored if option in row["options"]}
    return _render(latest([row for row in stored if row["run"] in runs]))


def render_sets(sets: Sequence[str]) -> str:
    """The same for sets of cases without features."""
    return _render(_rows_of(sets))


def ratios() -> dict[Point, float]:
    """Our speed relative to FlashAttention-3's at the points of the grid."""
    return {point_of(row): row["ratio"] for row in _rows_of(GRID) if row["ratio"] and _ours(row)}


def point_of(row: Row) -> Point:
    """The point of the grid that a row belongs to."""
    return row["op"], row["head_dim"], row["seqlen_q"], row["causal"]


def _stored() -> list[Row]:
    return load("nvidia-h200-flash3.json")


def _rows_of(sets: Sequence[str]) -> list[Row]:
    stored = _stored()
    return [row for name in sets for row in of_set(name, stored)]


def _ours(row: Row) -> bool:
    return bool(row["impl"] == _OURS)


def _render(rows: list[Row]) -> str:
    compared = [row for row in rows if _ours(row) and row["ratio"]]
    if not compared:
        return ""
    first = compared[0]
    body = [_line(row, _beside(row, rows)) for row in compared]
    header = ["pass", "head_dim", "batch · heads", "seqlen", "mask", "timed by"]
    header += ["cuflash", "FlashAttention-3", "ratio", "at least"]
    means = "; ".join(_mean(op, compared) for op in dict.fromkeys(r["op"] for r in compared))
    caption = f"{first['gpu']}, {first['dtype']}, JAX {first['jax']}, TFLOP/s, {first['date']}"
    return f"{caption}\n\n{means}.\n\n{table(header, body)}"


def _beside(row: Row, rows: Sequence[Row]) -> Row:
    """The peer's row of the same problem, which is the next one stored."""
    return rows[rows.index(row) + 1]


def _line(row: Row, peer: Row) -> list[str]:
    return [
        row["op"],
        str(row["head_dim"]),
        str(row["batch"] * row["heads_q"]),
        str(row["seqlen_q"]),
        hidden_by(row),
        row["how"],
        f"{row['tflops']:.0f}",
        f"{peer['tflops']:.0f}",
        f"{row['ratio']:.3f}",
        f"{row['ratio_low']:.3f}",
    ]


def _mean(op: str, rows: Sequence[Row]) -> str:
    ratios = [row["ratio"] for row in rows if row["op"] == op]
    return f"{op}: {geometric_mean(ratios):.2f} times FlashAttention-3, worst {min(ratios):.2f}"

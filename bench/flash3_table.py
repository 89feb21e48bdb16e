"""The table of FlashAttention-3 beside ours, both under ``jax.jit``."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

from .lines import hidden_by
from .markdown import table
from .stored import Row, latest, load

__all__ = ["render"]

_OURS = "cuflash"


def render(packed: bool = False) -> str:
    """A line for each case of the last run, and the mean of each pass; empty without rows.

    Packed sequences and other cases have separate runs; ``packed`` selects one of the two.
    """
    stored = load("nvidia-h200-flash3.json")
    rows = latest([row for row in stored if ("lengths" in row["options"]) == packed])
    compared = [row for row in rows if row["impl"] == _OURS and row["ratio"]]
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

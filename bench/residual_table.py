"""The tables of the accuracy and the cost of a float32 residual."""

from __future__ import annotations

from collections.abc import Sequence

from .markdown import table
from .residual import ERRORS, TIMES
from .stored import Row, latest, load

__all__ = ["render"]


def render() -> str:
    """Errors by shift and implementation, then times; empty without rows."""
    rows = latest(load("nvidia-h200-residual.json"))
    if not rows:
        return ""
    return f"{_errors([r for r in rows if r['what'] == ERRORS])}\n{_times(rows)}"


def _errors(rows: Sequence[Row]) -> str:
    impls = list(dict.fromkeys(row["impl"] for row in rows))
    found = {(row["shift"], row["impl"]): f"{row['error']:.1e}" for row in rows}
    body = [
        [str(shift), *(found[shift, impl] for impl in impls)]
        for shift in dict.fromkeys(row["shift"] for row in rows)
    ]
    first = rows[0]
    shape = " x ".join(map(str, first["shape"]))
    caption = (
        f"{first['gpu']}, {first['dtype']}, (batch, seqlen, heads, head_dim) {shape}, "
        f"error of dq against float64 in the norm, {first['date']}\n\n"
    )
    return caption + table(["common vector times", *impls], body)


def _times(rows: Sequence[Row]) -> str:
    timed = [row for row in rows if row["what"] == TIMES]
    body = [
        [
            row["impl"],
            str(row["head_dim"]),
            str(row["seqlen_q"]),
            f"{row['ms']:.3f}",
            f"{row['ratio']:.3f}",
        ]
        for row in timed
    ]
    first = timed[0]
    caption = (
        f"Forward and backward, batch {first['batch']}, {first['heads_q']} heads, causal, ms\n\n"
    )
    return caption + table(["", "head_dim", "seqlen", "ms", "times as fast"], body)

"""The table of programs under ``jax.jit``."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean
from typing import Any

from .flash3 import OURS, PEER
from .jitted import CALLBACK, CUDNN, TRIVIAL, XLA
from .markdown import table
from .stored import Row, latest, load

__all__ = ["render"]

#: The columns besides ours: implementations, and their names in the table.
_COLUMNS = {
    CALLBACK: "by Python",
    CUDNN: "jax.nn, cuDNN",
    XLA: "jax.nn, XLA",
    PEER: "FlashAttention-3",
    TRIVIAL: "x + 1",
}
_PEERS = (CUDNN, XLA, PEER)
_PROBLEM = ("op", "batch", "heads_q", "heads_kv", "head_dim", "seqlen_q", "seqlen_kv", "causal")


def render() -> str:
    """A line for each program of the last run, and the means of both passes; empty without rows."""
    lines = _lines(latest(load("nvidia-h200-jitted.json")))
    if not lines:
        return ""
    first = lines[0][OURS]
    caption = f"{first['gpu']}, {first['version']}, {first['dtype']}, µs a program, {first['date']}"
    header = ["gradients", "batch · heads", "head_dim", "seqlen", "mask", "calls", OURS]
    header += [*_COLUMNS.values(), "times as fast as the best"]
    means = "; ".join(_mean(op, lines) for op in ("forward", "backward"))
    return f"{caption}\n\n{means}.\n\n{table(header, [_cells(line) for line in lines])}"


def _lines(rows: Sequence[Row]) -> list[dict[str, Row]]:
    """The rows of each program, by implementation."""
    lines: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        key = row["calls"], *(row[name] for name in _PROBLEM)
        lines.setdefault(key, {})[row["impl"]] = row
    return list(lines.values())


def _cells(line: dict[str, Row]) -> list[str]:
    row = line[OURS]
    heads = row["batch"] * row["heads_q"], row["batch"] * row["heads_kv"]
    times = [f"{line[name]['us']:.1f}" if name in line else "" for name in (OURS, *_COLUMNS)]
    return [
        "yes" if row["op"] == "backward" else "no",
        f"{heads[0]}" if heads[0] == heads[1] else f"{heads[0]}/{heads[1]}",
        str(row["head_dim"]),
        str(row["seqlen_q"]),
        "causal" if row["causal"] else "full",
        str(row["calls"]),
        *times,
        f"{_ratio(line):.3f}",
    ]


def _ratio(line: dict[str, Row]) -> float:
    """Our speed relative to the best of the others."""
    return float(min(line[name]["ratio"] for name in _PEERS if name in line))


def _mean(op: str, lines: Sequence[dict[str, Row]]) -> str:
    ratios = [_ratio(line) for line in lines if line[OURS]["op"] == op]
    words = "with gradients" if op == "backward" else "without gradients"
    mean = f"{geometric_mean(ratios):.2f} times the best of the others"
    return f"{words} {mean}, worst {min(ratios):.2f}"

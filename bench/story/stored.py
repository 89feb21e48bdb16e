"""The stored rows of the parts."""

from __future__ import annotations

from pathlib import Path

from ..sources import is_current
from ..stored import Row, load
from .counts import of_row

__all__ = ["FILE", "PARTS", "name_of", "of_part", "outdated", "pass_of", "share_of", "story_rows"]

#: The file of the GPU that the tables show.
FILE = "nvidia-h200-story.json"
PARTS = ("speed", "memory", "io", "share")


def story_rows() -> list[Row]:
    """All stored rows."""
    return load(FILE)


def of_part(part: str) -> list[Row]:
    """The rows of a part from one run: the last of the runs that measured the most rows.

    Rows of the part io also have the computed counts.
    """
    runs: dict[str, list[Row]] = {}
    for row in story_rows():
        if row["part"] == part:
            runs.setdefault(row["run"], []).append(row)
    best = max(runs, key=lambda run: (_measured(runs[run]), run), default="")
    rows = runs.get(best, [])
    return [{**row, **of_row(row)} for row in rows] if part == "io" else rows


def _measured(rows: list[Row]) -> int:
    return sum(row.get("skipped") is None and row.get("no_counters") is None for row in rows)


def name_of(row: Row) -> str:
    """The name of a row in a line or a table."""
    return f"{row['label']}, filled" if row.get("setting") == "filled" else str(row["label"])


def share_of(tflops: float, peak: float | None) -> str:
    """Percent of a rate; empty if the rate is unknown."""
    return f"{100 * tflops / peak:.0f} %" if peak else ""


def pass_of(row: Row) -> str:
    """The pass of a row; the part io has no column for it."""
    return str(row.get("op") or row.get("pass") or "forward")


def outdated(root: Path) -> list[str]:
    """A line for every pass of a part whose rows are older than its kernels."""
    lines = []
    for part in PARTS:
        seen = {(r["label"], pass_of(r)): r for r in of_part(part) if r["sources"]}
        for (label, op), row in sorted(seen.items()):
            if not is_current(root, label.split()[-1], op, row):
                lines.append(f"{FILE}: {part}: {label} {op} changed since run {row['run']}")
    return lines

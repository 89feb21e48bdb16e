"""The stored rows of the parts."""

from __future__ import annotations

from pathlib import Path

from ..stored import Row, load

__all__ = ["FILE", "name_of", "of_part", "outdated", "share_of", "story_rows"]

#: Of the GPU that the README is of.
FILE = "nvidia-h200-story.json"


def story_rows() -> list[Row]:
    """All that are stored."""
    return load(FILE)


def of_part(part: str) -> list[Row]:
    """The rows of a part, of one run: the last of those that measured most of it."""
    runs: dict[str, list[Row]] = {}
    for row in story_rows():
        if row["part"] == part:
            runs.setdefault(row["run"], []).append(row)
    best = max(runs, key=lambda run: (_measured(runs[run]), run), default="")
    return runs.get(best, [])


def _measured(rows: list[Row]) -> int:
    return sum(row.get("skipped") is None and row.get("no_counters") is None for row in rows)


def name_of(row: Row) -> str:
    """What a line or a table calls a row."""
    return f"{row['label']}, filled" if row.get("setting") == "filled" else str(row["label"])


def share_of(tflops: float, peak: float | None) -> str:
    """Percent of a rate; nothing where it is not known."""
    return f"{100 * tflops / peak:.0f} %" if peak else ""


def outdated(root: Path) -> list[str]:
    """A line for every pass whose rows of the part speed are older than its kernel."""
    from ..sources import digest

    seen = {(r["label"], r["op"]): r for r in of_part("speed") if r["sources"]}
    lines = []
    for (label, op), row in sorted(seen.items()):
        if row["sources"] != digest(root, label.split()[-1], op):
            lines.append(f"{FILE}: speed: {label} {op} changed since run {row['run']}")
    return lines

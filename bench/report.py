"""Turns stored results into the README's tables and charts, and says what is out of date."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

from . import charts
from .cases import CASES
from .stored import gpu_files, gpu_rows, load, of_set
from .tables import LATENCY, SETS, render

__all__ = ["check", "names", "outdated", "render", "write"]

README = Path(__file__).parent.parent / "README.md"
_BLOCK = "<!-- results: {name} -->\n(.*?)<!-- end of results -->\n?"


def names(text: str) -> list[str]:
    """The blocks that a text has."""
    return re.findall(r"<!-- results: ([\w-]+) -->", text)


def check(text: str) -> list[str]:
    """Names of the blocks of a text that differ from the stored results, or are missing."""
    stale = []
    for name in names(text):
        found = re.search(_BLOCK.format(name=name), text, re.DOTALL)
        if not found or found[1] != render(name):
            stale.append(name)
    return stale + _missing(text)


def _missing(text: str) -> list[str]:
    """Sets with results, and no block in a text."""
    return [name for name in (*SETS, LATENCY) if name not in names(text) and render(name)]


def write(path: Path | None = None) -> None:
    """Bring the blocks of the README up to date; a set's first one comes after the others."""
    path = path or README
    text = path.read_text()
    for name in _missing(text):
        last = [block for block in names(text) if block != "cpu"][-1]
        found = re.search(_BLOCK.format(name=last), text, re.DOTALL)
        end = found.end() if found else len(text)
        text = f"{text[:end]}\n{_block(name)}\n{text[end:]}"
    for name in names(text):
        block = _block(name) + "\n"
        text = re.sub(_BLOCK.format(name=name), _literal(block), text, flags=re.DOTALL)
    path.write_text(text)


def _block(name: str) -> str:
    return f"<!-- results: {name} -->\n{render(name)}<!-- end of results -->"


def _literal(text: str) -> str:
    """A replacement that stands for itself."""
    return text.replace("\\", r"\\")


def draw_charts() -> list[Path]:
    """Draw the charts of every set that has rows."""
    return [charts.draw(chart) for chart in _charts()]


def missing_charts() -> list[str]:
    """Charts that the README shows and nobody has drawn."""
    return [chart.file for chart in _charts() if not (charts.CHARTS / chart.file).exists()]


def _charts() -> list[charts.Chart]:
    rows = gpu_rows()
    found = []
    for name in SETS:
        of_name = of_set(name, rows)
        turns = [row for row in of_name if row["protocol"] == "turns"]
        found += charts.charts_of(name, turns or of_name)
    return found


def outdated() -> list[str]:
    """A line for every pass of a set whose stored rows are older than its kernel."""
    from cuflash.cuda.source import find_sources

    from .sources import KERNELS, digest

    root, lines = find_sources(), []
    for path, name in product(gpu_files(), CASES):
        ours = [row for row in of_set(name, load(path.name)) if row["sources"]]
        for algorithm, op in sorted({(row["options"]["algorithm"], row["op"]) for row in ours}):
            rows = [r for r in ours if (r["options"]["algorithm"], r["op"]) == (algorithm, op)]
            where = f"{path.name}: {name}: {algorithm} {op}"
            kernels = KERNELS.get((algorithm, op), ())
            if not kernels or not all((root / a / f"{b}.cu").exists() for a, b in kernels):
                lines.append(f"{where} is not in the sources")
            elif any(row["sources"] != digest(root, algorithm, op) for row in rows):
                lines.append(f"{where} changed since run {rows[0]['run']}")
    return lines

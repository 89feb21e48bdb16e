"""Turns stored results into tables and charts of the pages, and reports what is out of date."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

from . import charts, drawing, opening
from .cases import CASES
from .documents import CHARTS, PAGES, relocated
from .stored import gpu_files, gpu_rows, load, of_set
from .story.charts import drawings as story_drawings
from .story.stored import outdated as story_outdated
from .tables import SETS, render

__all__ = ["check", "faults", "names", "outdated", "render", "write"]

ROOT = Path(__file__).parent.parent
_BLOCK = "<!-- results: {name} -->\n(.*?)<!-- end of results -->\n?"


def names(text: str) -> list[str]:
    """The names of the blocks in a text."""
    return re.findall(r"<!-- results: ([\w-]+) -->", text)


def check(page: str, text: str) -> list[str]:
    """Names of the blocks of a page that differ from the stored results, or are missing.

    It also names blocks of the page that are missing in :data:`~bench.documents.PAGES`.
    """
    stale = []
    for name in names(text):
        found = re.search(_BLOCK.format(name=name), text, re.DOTALL)
        if name not in PAGES[page] or not found or found[1] != _shown(name, page):
            stale.append(name)
    return stale + _missing(page, text)


def faults(root: Path | None = None) -> list[str]:
    """A line for every block of a page that differs from the stored results."""
    root = root or ROOT
    return [
        f"{page}: the block {name!r} differs from the results"
        for page in PAGES
        for name in check(page, (root / page).read_text("utf-8"))
    ]


def write(root: Path | None = None) -> None:
    """Bring the blocks of all pages up to date, and add those that are missing."""
    root = root or ROOT
    for page in PAGES:
        path = root / page
        text = path.read_text("utf-8")
        for name in _missing(page, text):
            place = _place(name, page, text)
            text = f"{text[:place]}\n{_block(name, page)}\n{text[place:]}"
        for name in names(text):
            block = _block(name, page) + "\n"
            text = re.sub(_BLOCK.format(name=name), _literal(block), text, flags=re.DOTALL)
        path.write_text(text, "utf-8")


def _missing(page: str, text: str) -> list[str]:
    """The blocks of a page that have results but are not in its text."""
    there = names(text)
    return [name for name in PAGES[page] if name not in there and render(name)]


def _place(name: str, page: str, text: str) -> int:
    """The position of a missing block: after the nearest earlier block that the page has, else at
    the end."""
    before = PAGES[page][: PAGES[page].index(name)]
    there = [block for block in before if block in names(text)]
    found = re.search(_BLOCK.format(name=there[-1]), text, re.DOTALL) if there else None
    return found.end() if found else len(text)


def _shown(name: str, page: str) -> str:
    return relocated(render(name), page)


def _block(name: str, page: str) -> str:
    return f"<!-- results: {name} -->\n{_shown(name, page)}<!-- end of results -->"


def _literal(text: str) -> str:
    """A replacement text without special characters."""
    return text.replace("\\", r"\\")


def draw_charts() -> list[Path]:
    """Draw all charts that have rows."""
    return [drawing.draw(one, charts.CHARTS) for one in _drawings()]


def wrong_charts() -> list[str]:
    """A line for every chart that is not drawn, or shows something else than the results."""
    faults = ((one.file, drawing.fault(one, charts.CHARTS)) for one in _drawings())
    return [f"{CHARTS}/{file} {why}" for file, why in faults if why]


def _drawings() -> list[drawing.Drawing]:
    rows = gpu_rows()
    found = opening.drawings() + story_drawings()
    for name in SETS:
        of_name = of_set(name, rows)
        turns = [row for row in of_name if row["protocol"] == "turns"]
        found += map(charts.drawing_of, charts.charts_of(name, turns or of_name))
    return found


def outdated() -> list[str]:
    """A line for every pass of a set whose stored rows are older than its kernel."""
    from cuflash.cuda.source import find_sources

    from .sources import KERNELS, is_current

    root, lines = find_sources(), []
    for path, name in product(gpu_files(), CASES):
        ours = [row for row in of_set(name, load(path.name)) if row["sources"]]
        for algorithm, op in sorted({(row["options"]["algorithm"], row["op"]) for row in ours}):
            rows = [r for r in ours if (r["options"]["algorithm"], r["op"]) == (algorithm, op)]
            where = f"{path.name}: {name}: {algorithm} {op}"
            kernels = KERNELS.get((algorithm, op), ())
            if not kernels or not all((root / a / f"{b}.cu").exists() for a, b in kernels):
                lines.append(f"{where} is not in the sources")
            elif not all(is_current(root, algorithm, op, row) for row in rows):
                lines.append(f"{where} changed since run {rows[0]['run']}")
    return lines + story_outdated(root)

"""Turns stored results into the README's tables and charts, and says what is out of date."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

from . import charts, drawing, opening
from .cases import CASES
from .stored import gpu_files, gpu_rows, load, of_set
from .story.charts import drawings as story_drawings
from .story.stored import outdated as story_outdated
from .story.tables import BLOCKS as STORY
from .tables import COLD, FLASH3, FLASH3_PACKED, JIT, LATENCY, RESIDUAL, SETS, render

__all__ = ["check", "names", "outdated", "render", "write"]

README = Path(__file__).parent.parent / "README.md"
#: Heading of the story's blocks, and of what comes after them.
SECTION, BEFORE = "## The papers' claims, measured here\n", "## Architecture\n"
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
    """What has results, and no block in a text."""
    blocks = ("opening", *SETS, LATENCY, COLD, JIT, FLASH3, FLASH3_PACKED, RESIDUAL, *STORY)
    return [name for name in blocks if name not in names(text) and render(name)]


def write(path: Path | None = None) -> None:
    """Bring the blocks of the README up to date, and add those that are missing."""
    path = path or README
    text = path.read_text()
    for name in _missing(text):
        if name in STORY and not set(STORY) & set(names(text)):
            text = _with_section(text)
            place = text.index(SECTION) + len(SECTION)
        else:
            place = _place(name, text)
        text = f"{text[:place]}\n{_block(name)}\n{text[place:]}"
    for name in names(text):
        block = _block(name) + "\n"
        text = re.sub(_BLOCK.format(name=name), _literal(block), text, flags=re.DOTALL)
    path.write_text(text)


def _place(name: str, text: str) -> int:
    """Where a missing block goes: the opening before all, others after the last of their kind."""
    if name == "opening":
        return _after_paragraphs(text)
    kind = STORY if name in STORY else ("fa1", *SETS)
    there = [block for block in names(text) if block in kind]
    found = re.search(_BLOCK.format(name=there[-1]), text, re.DOTALL) if there else None
    return found.end() if found else len(text)


def _after_paragraphs(text: str) -> int:
    """Behind the title and the first paragraph."""
    second = text.find("\n\n", text.find("\n\n") + 2)
    return len(text) if second < 0 else second + 1


def _with_section(text: str) -> str:
    """With the story's heading, before the architecture's or at the end."""
    if SECTION in text:
        return text
    place = text.find(BEFORE)
    place = len(text) if place < 0 else place
    return f"{text[:place]}{SECTION}\n{text[place:]}"


def _block(name: str) -> str:
    return f"<!-- results: {name} -->\n{render(name)}<!-- end of results -->"


def _literal(text: str) -> str:
    """A replacement that stands for itself."""
    return text.replace("\\", r"\\")


def draw_charts() -> list[Path]:
    """Draw everything that there are rows of."""
    return [drawing.draw(one, charts.CHARTS) for one in _drawings()]


def wrong_charts() -> list[str]:
    """A line for every chart that is not drawn, or shows something else than the results."""
    faults = ((one.file, drawing.fault(one, charts.CHARTS)) for one in _drawings())
    return [f"bench/charts/{file} {why}" for file, why in faults if why]


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

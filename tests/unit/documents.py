"""The pages of the documentation, and the blocks of code that they show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Block", "blocks", "pages", "read"]

ROOT = Path(__file__).parents[2]
#: A block of Python, and the hidden line before it if there is one.
_BLOCK = re.compile(
    r"^(?:<!-- test: (?P<marker>\w+) -->\n)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """A block of Python on a page.

    Attributes
    ----------
    marker
        "compile" if the block needs a GPU, or None.
    """

    page: str
    line: int
    code: str
    marker: str | None

    def compiled(self) -> object:
        """The compiled code; a traceback shows the page and its line."""
        return compile("\n" * (self.line - 1) + self.code, self.page, "exec")


def pages() -> list[str]:
    """All pages, by their paths from the root."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def read(page: str) -> str:
    """The text of a page."""
    return (ROOT / page).read_text("utf-8")


def blocks(page: str) -> Iterator[Block]:
    """The blocks of Python of a page, in order."""
    text = read(page)
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("code")) + 1
        yield Block(page, line, found["code"], found["marker"])

"""Turns numpydoc docstrings into Markdown for mkdocstrings, without changing their words.

Parameters that share a description stay together, and roles such as ``:func:`attention``` become
links to the reference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|meth|attr|data|mod):`~?([\w.]+)`")
_HEADING = re.compile(r"^(\w[\w ]*)\n-{3,}\n", re.MULTILINE)
#: Sections whose items have a line of names and an indented description.
_OF_ITEMS = ("Parameters", "Returns", "Raises", "Attributes", "Yields", "Warns")
_PACKAGE = "cuflash"


class Numpydoc(griffe.Extension):
    """Rewrites all docstrings of the package."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Rewrite the docstrings of all members of the package."""
        del kwargs
        public = {str(name) for name in pkg.exports or ()}

        def link(found: re.Match[str]) -> str:
            name = found[1].removeprefix(f"{_PACKAGE}.")
            known = name.split(".")[0] in public or name == "jax.attention"
            return f"[`{found[1]}`][{_PACKAGE}.{name}]" if known else f"`{found[1]}`"

        for docstring in _docstrings(pkg):
            docstring.value = markdown(docstring.value, link)


def _docstrings(item: Any) -> Iterator[griffe.Docstring]:
    if item.docstring is not None:
        yield item.docstring
    for member in item.members.values():
        if not member.is_alias:
            yield from _docstrings(member)


def markdown(text: str, link: Callable[[re.Match[str]], str]) -> str:
    """A docstring whose sections are headings in bold and lists of definitions."""
    head, *sections = _HEADING.split(text)
    parts = [head.strip()]
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        parts.append(f"**{title}**")
        if title in _OF_ITEMS:
            parts += _items(body.rstrip())
        else:
            parts.append(_fenced(body.strip()))
    return _ROLE.sub(link, "\n\n".join(parts))


def _items(body: str) -> Iterator[str]:
    """A definition for every item; names may take several lines."""
    names: list[str] = []
    lines: list[str] = []
    for line in body.splitlines():
        if line and not line.startswith(" "):
            if lines:
                yield _definition(names, lines)
                names, lines = [], []
            names.append(line)
        else:
            lines.append(line)
    if names:
        yield _definition(names, lines)


def _definition(names: list[str], lines: list[str]) -> str:
    name, colon, kind = " ".join(names).partition(" : ")
    term = ", ".join(f"`{one}`" for one in name.split(", ")) + (f" : {kind}" if colon else "")
    first, *others = "\n".join(lines).strip().splitlines() or [""]
    return "\n".join([term, f":   {first}", *others])


def _fenced(text: str) -> str:
    """Examples as code."""
    return f"```pycon\n{text}\n```" if text.startswith(">>>") else text

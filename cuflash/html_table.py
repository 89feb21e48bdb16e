"""Tables for notebooks, which show an object by its ``_repr_html_``."""

from __future__ import annotations

import html
from collections.abc import Iterable

__all__ = ["html_table"]


def html_table(rows: Iterable[tuple[str, str]]) -> str:
    """A table of two columns, names and values, with both escaped.

    Parameters
    ----------
    rows
        A name and its value for every row, in order.
    """
    left = ' style="text-align: left"'
    lines = (
        f"<tr><th{left}>{html.escape(name)}</th><td{left}>{html.escape(value)}</td></tr>"
        for name, value in rows
    )
    return f"<table>{''.join(lines)}</table>"

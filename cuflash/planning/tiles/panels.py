"""Panels: the layout in which TMA writes matrices to shared memory and ``wgmma`` reads them."""

from __future__ import annotations

from .common import ceil_div

__all__ = ["PANEL", "panels"]

#: Columns of a panel: 128 bytes, the span of the widest swizzle.
PANEL = 64


def panels(rows: int, columns: int) -> int:
    """Return the bytes of a matrix of 16-bit numbers; its last panel may have unused columns."""
    return ceil_div(columns, PANEL) * rows * 128

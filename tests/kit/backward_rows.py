"""The rows of FlashAttention-3's table of gradients."""

from __future__ import annotations

from cuflash.planning.tiles.fa3_tables import BACKWARD, BackwardRow

__all__ = ["widths_of"]


def widths_of(row: BackwardRow) -> tuple[int, int]:
    """Return the widest heads of q and v whose plain passes take the row.

    Where another row takes all wider heads, those of q are narrower.
    """
    widths = row.widest, row.widest_v
    others = (one for one in BACKWARD if one != row and one.wider_than)
    narrow = [one.wider_than for one in others if (one.widest, one.widest_v) == widths]
    return min(row.widest, *narrow) if narrow else row.widest, row.widest_v

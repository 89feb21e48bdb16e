"""The tile of ``sum_parts``, which adds up the parts of dK and dV."""

from __future__ import annotations

from dataclasses import dataclass

from .common import Footprint
from .panels import PANEL, panels

__all__ = ["SUM_COLUMNS", "SUM_ROWS", "SumTile"]

#: What a warp adds up of the parts of dK or dV: the rows of a fragment, and as many columns as
#: divide every width.
SUM_ROWS, SUM_COLUMNS = 16, 32


@dataclass(frozen=True)
class SumTile:
    """``sum_parts``: places of :data:`SUM_ROWS` by :data:`SUM_COLUMNS`, one for each warp."""

    warps: int = 8

    @property
    def footprint(self) -> Footprint:
        """A panel of rows on their way out for each warp."""
        return Footprint(self.warps * panels(SUM_ROWS, PANEL), 128, 32 * self.warps)

    def constants(self) -> dict[str, int]:
        """What the device code reads from ``Config``."""
        return {"warps": self.warps, "sum_rows": SUM_ROWS, "sum_columns": SUM_COLUMNS}

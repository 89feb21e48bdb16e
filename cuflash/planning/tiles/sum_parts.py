"""The tile of ``sum_parts``, which adds partial dK and dV."""

from __future__ import annotations

from dataclasses import dataclass

from .common import Footprint
from .panels import PANEL, panels

__all__ = ["SUM_COLUMNS", "SUM_ROWS", "SumTile"]

#: Rows and columns of dK or dV that a warp adds: the rows of a fragment, and a number of columns
#: that divides every width.
SUM_ROWS, SUM_COLUMNS = 16, 32


@dataclass(frozen=True)
class SumTile:
    """``sum_parts``: a warp adds :data:`SUM_ROWS` rows by :data:`SUM_COLUMNS` columns."""

    warps: int = 8

    @property
    def footprint(self) -> Footprint:
        """Shared memory holds a panel of output rows for each warp."""
        return Footprint(self.warps * panels(SUM_ROWS, PANEL), 128, 32 * self.warps)

    def constants(self) -> dict[str, int]:
        """Return the constants that the device code reads from ``Config``."""
        return {"warps": self.warps, "sum_rows": SUM_ROWS, "sum_columns": SUM_COLUMNS}

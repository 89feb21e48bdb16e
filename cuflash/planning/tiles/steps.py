"""The small kernels that generations share."""

from __future__ import annotations

from dataclasses import dataclass

from ..device import DeviceLimits
from .common import Footprint, ceil_div

__all__ = ["DeltaTile", "delta_tile"]


@dataclass(frozen=True)
class DeltaTile:
    """``delta``: one warp a row, ``warps`` warps a block, rows dealt in turns."""

    warps: int
    grid: int

    @property
    def footprint(self) -> Footprint:
        """Registers only."""
        return Footprint(0, 40, 32 * self.warps)

    def constants(self) -> dict[str, int]:
        """What the device code reads from ``Config``."""
        return {"warps": self.warps}


def delta_tile(rows: int, limits: DeviceLimits) -> DeltaTile:
    """Eight blocks of eight warps for each multiprocessor hide the memory's latency."""
    warps = 8
    return DeltaTile(warps, min(ceil_div(rows, warps), 8 * limits.num_sms))

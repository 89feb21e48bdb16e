"""Tiles in shared memory of an array with a number for every pair, such as a bias."""

from __future__ import annotations

from typing import NamedTuple

from .common import ceil_div

__all__ = ["NO_OPERAND", "OperandTiles"]


class OperandTiles(NamedTuple):
    """A ring of tiles of an array of pairs; empty without such an array."""

    stages: int = 0
    rows: int = 0
    itemsize: int = 0  # bytes of an element

    def nbytes(self, block_kv: int) -> int:
        """Return the bytes of the panels, with rows of 128 bytes, and of their barriers."""
        panels = ceil_div(block_kv * self.itemsize, 128)
        return self.stages * panels * self.rows * 128 + 1024 if self.stages else 0

    def constants(self) -> dict[str, int]:
        """Return the constants that the device code reads from ``Config``."""
        return {
            "operand_stages": self.stages,
            "operand_rows": self.rows,
            "operand_bytes": self.itemsize,
        }


NO_OPERAND = OperandTiles()

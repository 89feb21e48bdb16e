"""Tiles of an array of pairs that a term of the scores reads, in shared memory."""

from __future__ import annotations

from typing import NamedTuple

from .common import ceil_div

__all__ = ["NO_OPERAND", "OperandTiles"]


class OperandTiles(NamedTuple):
    """A ring of them; none where there is no such array."""

    stages: int = 0
    rows: int = 0
    itemsize: int = 0  # bytes of an element

    def nbytes(self, block_kv: int) -> int:
        """Of panels of 128 bytes a row and of the barriers, which lie before all others."""
        panels = ceil_div(block_kv * self.itemsize, 128)
        return self.stages * panels * self.rows * 128 + 1024 if self.stages else 0

    def constants(self) -> dict[str, int]:
        """What the device code reads from ``Config``."""
        return {
            "operand_stages": self.stages,
            "operand_rows": self.rows,
            "operand_bytes": self.itemsize,
        }


NO_OPERAND = OperandTiles()

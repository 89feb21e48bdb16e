"""The time of a step of a block, by the number of blocks on its multiprocessor."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StepTime"]


@dataclass(frozen=True)
class StepTime:
    """Microseconds of a step of a block: alone on its multiprocessor, and with it full."""

    alone: float
    beside: float

    def among(self, blocks: int, most: int) -> float:
        """Return the time with ``blocks`` on the multiprocessor, which may have ``most``."""
        if most == 1:
            return self.alone
        return self.alone + (self.beside - self.alone) * (min(blocks, most) - 1) / (most - 1)

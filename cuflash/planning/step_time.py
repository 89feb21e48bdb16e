"""How long a step of a block takes, by what else its multiprocessor has to do."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StepTime"]


@dataclass(frozen=True)
class StepTime:
    """Microseconds of a step of a block: alone on its multiprocessor, and beside others."""

    alone: float
    beside: float

    def among(self, blocks: int, most: int) -> float:
        """Of a block among as many on a multiprocessor, which may have ``most``."""
        if most == 1:
            return self.alone
        return self.alone + (self.beside - self.alone) * (min(blocks, most) - 1) / (most - 1)

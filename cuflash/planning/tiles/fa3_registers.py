"""Registers of the warpgroups of FlashAttention-3."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BACKWARD", "FORWARD", "LISTED_BACKWARD", "Registers"]


@dataclass(frozen=True)
class Registers:
    """Registers of a thread after the load warpgroup has given its own away."""

    load: int
    math: int


#: By warpgroups that do arithmetic and blocks on a multiprocessor. All warpgroups start with the
#: same number, so what is given and taken adds up to at most that many times their number.
FORWARD = {
    (1, 1): Registers(64, 256),  # which start with nearly as many
    (1, 2): Registers(64, 192),
    (1, 3): Registers(48, 112),
    (2, 1): Registers(40, 232),
    (3, 1): Registers(32, 160),
    (4, 1): Registers(32, 112),
}
BACKWARD = Registers(24, 240)  # of two that do arithmetic
LISTED_BACKWARD = Registers(40, 232)  # where load, which has little, finds steps in lists

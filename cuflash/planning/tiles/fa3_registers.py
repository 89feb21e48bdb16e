"""Registers of the warpgroups of FlashAttention-3."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BACKWARD", "FORWARD", "LISTED_BACKWARD", "Registers"]


@dataclass(frozen=True)
class Registers:
    """Registers of a thread after the load warpgroup has released some of its registers."""

    load: int
    math: int


#: By warpgroups that compute and blocks on a multiprocessor. All warpgroups start with the same
#: number of registers, and the sum over all warpgroups does not exceed the sum at the start.
FORWARD = {
    (1, 1): Registers(64, 256),  # the warpgroups start with nearly as many
    (1, 2): Registers(64, 192),
    (1, 3): Registers(48, 112),
    (2, 1): Registers(40, 232),
    (3, 1): Registers(32, 160),
    (4, 1): Registers(32, 112),
}
BACKWARD = Registers(24, 240)  # two warpgroups compute
LISTED_BACKWARD = Registers(40, 232)  # the load warpgroup needs more to read lists of steps

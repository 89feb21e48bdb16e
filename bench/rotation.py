"""Copies of keys and values that take turns, so that no call finds its own in the L2 cache.

A call that is repeated on the same arrays reads what fits from L2. A step of
decoding does not: all other layers have been there since the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .cases import Case
from .inputs import Inputs

__all__ = ["L2", "TIMES", "copies_of", "in_turn", "number_of"]

#: Bytes of the larger cache of those that are timed: an H200 reports 60 MiB, an H100 50.
L2 = 60 * 2**20
#: How many times as much all copies hold together.
TIMES = 3
#: Copies at least: the end of one is read between two beginnings of another.
FEWEST = 2


def number_of(case: Case) -> int:
    """How many copies a case takes turns on; 1 where it asks for none."""
    if not case.rotated:
        return 1
    return max(FEWEST, -(-TIMES * L2 // case.key_bytes))


def copies_of(case: Case, inputs: Inputs) -> list[Inputs]:
    """The inputs, and as many others whose keys and values are copies."""
    more = range(number_of(case) - 1)
    return [inputs, *(replace(inputs, k=_copy(inputs.k), v=_copy(inputs.v)) for _ in more)]


def in_turn(calls: Sequence[Callable[[], Any]]) -> Callable[[], None]:
    """One call after the other; a result lives no longer than its call."""

    def several() -> None:
        for call in calls:
            call()

    return several


def _copy(array: Any) -> Any:
    """Of the bits, whatever a library knows of their type."""
    return array.view(f"uint{8 * array.dtype.itemsize}").copy().view(array.dtype)

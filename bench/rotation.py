"""Copies of keys and values that take turns, so that no call finds its arrays in the L2 cache.

A call that is repeated on the same arrays reads what fits from L2. A layer of a model cannot do so
in a step of decoding: all other layers have run since its last step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .cases import Case
from .inputs import Inputs

__all__ = ["L2", "TIMES", "copies_of", "in_turn", "number_of"]

#: The larger L2 of the timed devices in bytes: an H200 reports 60 MiB, an H100 50.
L2 = 60 * 2**20
#: The size of all copies together, as a multiple of L2.
TIMES = 3
#: The fewest copies: between two calls on one copy, at least one other copy is read.
FEWEST = 2


def number_of(case: Case) -> int:
    """The number of copies of a case that take turns; 1 if it is not rotated."""
    if not case.rotated:
        return 1
    return max(FEWEST, -(-TIMES * L2 // case.key_bytes))


def copies_of(case: Case, inputs: Inputs) -> list[Inputs]:
    """The inputs, and further inputs with copies of their keys and values."""
    more = range(number_of(case) - 1)
    return [inputs, *(replace(inputs, k=_copy(inputs.k), v=_copy(inputs.v)) for _ in more)]


def in_turn(calls: Sequence[Callable[[], Any]]) -> Callable[[], None]:
    """A function that makes the calls one after another and drops each result at once."""

    def several() -> None:
        for call in calls:
            call()

    return several


def _copy(array: Any) -> Any:
    """A copy, made as integers because CuPy may lack the dtype."""
    return array.view(f"uint{8 * array.dtype.itemsize}").copy().view(array.dtype)

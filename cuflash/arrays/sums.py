"""Whether a sum of steps can lie in an interval: the number theory behind overlap."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["MOST_STEPS", "can_reach"]

#: The most steps of the search; beyond them the answer is yes. Slices, transposes and broadcasts of
#: one block of memory take about ten.
MOST_STEPS = 50_000


class _Term(NamedTuple):
    """One step size of a sum, with facts about the terms after it.

    Attributes
    ----------
    step, most
        The sum takes ``step`` any number of times from 0 to ``most``.
    rest
        The largest sum of the terms after this one.
    divisor
        The greatest common divisor of this step and those after it.
    dense
        Whether this term and those after it reach every multiple of ``divisor`` up to their largest
        sum.
    """

    step: int
    most: int
    rest: int
    divisor: int
    dense: bool


def can_reach(steps: Iterable[tuple[int, int]], low: int, high: int) -> bool:
    """Whether integers ``0 <= n_i <= most_i`` exist with ``low <= sum(step_i * n_i) <= high``.

    Parameters
    ----------
    steps
        ``(step_i, most_i)``, none of them negative.
    low, high
        The interval, ends included.

    Returns
    -------
    bool
        Exact, except that a search of more than :data:`MOST_STEPS` steps returns True. The general
        problem is NP-complete.
    """
    steps = [(step, most) for step, most in steps if step and most]
    if high < 0 or low > sum(step * most for step, most in steps):
        return False
    terms = _prepare(steps)
    waiting = [(0, low, high)]
    left = MOST_STEPS
    while waiting:
        index, low, high = waiting.pop()
        left -= 1
        if low <= 0 <= high:
            return True
        if high < 0 or index == len(terms):
            continue
        step, most, rest, divisor, dense = terms[index]
        largest = step * most + rest
        multiple = high // divisor * divisor  # the last multiple within the interval
        if low > largest or multiple < low:
            continue
        if dense:
            return True
        first = max(0, -((rest - low) // step))
        last = min(most, high // step)
        # The terms after this one must make up the rest; most often one choice is left.
        if len(waiting) + last - first >= left:
            return True
        waiting += ((index + 1, low - step * n, high - step * n) for n in range(first, last + 1))
    return False


def _prepare(steps: Iterable[tuple[int, int]]) -> list[_Term]:
    """The terms from the longest step to the shortest; equal steps form one term."""
    merged: dict[int, int] = {}
    for step, most in steps:
        merged[step] = merged.get(step, 0) + most
    terms: list[_Term] = []
    rest, divisor, dense = 0, 0, True
    for step, most in sorted(merged.items()):
        # Dense terms stay dense if the new step skips no multiple.
        divisor, before = math.gcd(divisor, step), divisor
        dense = dense and (not before or (before == divisor and step <= rest + divisor))
        terms.append(_Term(step, most, rest, divisor, dense))
        rest += step * most
    return terms[::-1]

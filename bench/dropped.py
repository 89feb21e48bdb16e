"""Checks outputs with dropout against their expectation and their expected deviation.

Every implementation draws in its own way, so a single call has no true result. All results are
linear in the kept weights, so their mean is the result without dropout. For the output and for the
gradient of v, the squared distance of a row from that mean is on average ``p / (1 - p)`` times the
sum of the squares of the weighted rows that it consists of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .cases import Case
from .inputs import Inputs, array_module, widened
from .verify import Truth

__all__ = ["DroppedTruth", "truth_of"]

#: How far the projection of the results on their expectation may differ from 1 (as a ratio).
MEAN = 0.05
#: The factor by which the distances may be too large or too small.
SPREAD = 1.25


class DroppedTruth(Truth):
    """The expectation of a case with dropout, in the first and the last head."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        super().__init__(replace(case, dropout_p=None), inputs)
        p = case.dropout_p or 0.0
        self._odds = p / (1 - p)

    def worst_ratio(self, outputs: Sequence[Any]) -> float:
        """The error of means and distances relative to its bound; infinite for NaN."""
        worst = 0.0
        for head in self._heads:
            for x, (of_head, rows, truth, model) in zip(outputs, head.tensors, strict=True):
                found = widened(x[head.batch, :, of_head])[rows]
                worst = max(worst, _of_mean(found, truth, model))
            worst = max(worst, self._of_spread(found, truth, model))  # ``found`` is out or dv now
        return worst

    @property
    def limit(self) -> float:
        """The ratio beyond which the result is wrong."""
        return 1.0

    def _of_spread(self, found: Any, truth: Any, model: Any) -> float:
        xp = array_module(found)
        squares = ((found - truth) ** 2).sum(-1) / xp.maximum(model, 1e-300) ** 2
        mean = float(squares.mean())
        if not 0 < mean < math.inf:
            return math.inf
        return abs(math.log(mean / self._odds)) / math.log(SPREAD)


def _of_mean(found: Any, truth: Any, model: Any) -> float:
    """The error of the projection on the expectation; rows of every size have the same weight."""
    xp = array_module(found)
    weight = 1 / xp.maximum(model, 1e-300)[:, None] ** 2
    part = float((found * truth * weight).sum() / (truth * truth * weight).sum())
    return abs(part - 1) / MEAN if math.isfinite(part) else math.inf


def truth_of(case: Case, inputs: Inputs) -> Truth:
    """The expected results of a case."""
    return (DroppedTruth if case.dropout_p else Truth)(case, inputs)

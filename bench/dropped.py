"""Holds outputs with dropout against what they are on average, and against how far they are off.

Every implementation draws in its own way, so there is no truth of one call. All results are linear
in what is kept: their mean is the result without dropout. Of the output, and of the gradient of v,
the square of a row's distance from it is on average ``p / (1 - p)`` times the sum of the squares of
the weighted rows that it is made of.
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

#: How far the part of the mean that is found may be from 1, in ratios of the squares of norms.
MEAN = 0.05
#: How many times too large, or too small, the distances may be.
SPREAD = 1.25


class DroppedTruth(Truth):
    """What a case with dropout has to give, in the first and the last head."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        super().__init__(replace(case, dropout_p=None), inputs)
        p = case.dropout_p or 0.0
        self._odds = p / (1 - p)

    def worst_ratio(self, outputs: Sequence[Any]) -> float:
        """How far means and distances are off, in parts of what they may be; infinite for NaN."""
        worst = 0.0
        for head in self._heads:
            for x, (of_head, rows, truth, model) in zip(outputs, head.tensors, strict=True):
                found = widened(x[head.batch, :, of_head])[rows]
                worst = max(worst, _of_mean(found, truth, model))
            worst = max(worst, self._of_spread(found, truth, model))  # of the last: out, or dv
        return worst

    @property
    def limit(self) -> float:
        """The ratio beyond which something else was computed."""
        return 1.0

    def _of_spread(self, found: Any, truth: Any, model: Any) -> float:
        xp = array_module(found)
        squares = ((found - truth) ** 2).sum(-1) / xp.maximum(model, 1e-300) ** 2
        mean = float(squares.mean())
        if not 0 < mean < math.inf:
            return math.inf
        return abs(math.log(mean / self._odds)) / math.log(SPREAD)


def _of_mean(found: Any, truth: Any, model: Any) -> float:
    """Rows count alike, whatever their size."""
    xp = array_module(found)
    weight = 1 / xp.maximum(model, 1e-300)[:, None] ** 2
    part = float((found * truth * weight).sum() / (truth * truth * weight).sum())
    return abs(part - 1) / MEAN if math.isfinite(part) else math.inf


def truth_of(case: Case, inputs: Inputs) -> Truth:
    """What a case has to give."""
    return (DroppedTruth if case.dropout_p else Truth)(case, inputs)

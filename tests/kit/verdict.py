"""The kit's judgement of a result, and the worst judgements of a session."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from .case import Case

__all__ = ["REGISTRY", "Registry", "Result", "Verdict", "verdict_of", "worst_of"]

_Index = tuple[int, ...]


@dataclass(frozen=True)
class Verdict:
    """The finding of one rule: the worst ratio, its place, and the limit."""

    rule: str
    ratio: float
    limit: float = 1.0
    index: _Index = ()
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.ratio <= self.limit  # False for NaN


@dataclass(frozen=True)
class Result:
    """The verdicts on one tensor; arrays are (batch, head, row, dim) or (batch, head, row)."""

    case: Case
    name: str
    verdicts: tuple[Verdict, ...]
    got: np.ndarray
    expected: np.ndarray

    @property
    def worst(self) -> Verdict:
        """The verdict nearest to its limit, or farthest beyond it."""
        return max(self.verdicts, key=lambda v: v.ratio / v.limit if v.ratio == v.ratio else np.inf)

    @property
    def passed(self) -> bool:
        return all(verdict.passed for verdict in self.verdicts)

    def check(self) -> Result:
        """Raise AssertionError with the repro line unless every rule passed."""
        failed = [verdict for verdict in self.verdicts if not verdict.passed]
        if failed:
            lines = [line for verdict in failed for line in self._tell(verdict)]
            raise AssertionError("\n".join([*lines, f"repro: {self.case.repro}"]))
        return self

    def _tell(self, verdict: Verdict) -> Iterable[str]:
        yield (
            f"{self.name}: rule {verdict.rule}: {verdict.ratio:.4g}, allowed {verdict.limit:.4g}"
            f"{verdict.detail and ': '}{verdict.detail}"
        )
        if verdict.index and self.got.shape == self.expected.shape:
            got, expected = (np.asarray(x[verdict.index]) for x in (self.got, self.expected))
            yield f"  at (batch, head, row, ...) = {verdict.index}"
            yield f"  got      {_few(got)}"
            yield f"  expected {_few(expected)}"


def _few(row: np.ndarray) -> str:
    return np.array2string(row.astype(np.float64), precision=9, threshold=8, edgeitems=4)


@dataclass
class Registry:
    """The worst verdict of every tensor, dtype and rule of a session."""

    worst: dict[tuple[str, str, str], tuple[Verdict, str]] = field(default_factory=dict)

    def add(self, case: Case, name: str, verdicts: Iterable[Verdict]) -> None:
        for verdict in verdicts:
            key = (name, case.dtype, verdict.rule)
            if key not in self.worst or not verdict.ratio <= self.worst[key][0].ratio:
                self.worst[key] = (verdict, case.repro)

    def report(self) -> list[str]:
        """One line for each tensor, dtype and rule, printed at the end of a test session."""
        return [
            f"{name:<14}{dtype:<9} {rule:<9} {verdict.ratio:8.3g} of {verdict.limit:g}  {repro}"
            for (name, dtype, rule), (verdict, repro) in sorted(self.worst.items())
            if verdict.ratio > 0
        ]


#: The verdicts of ``compare`` and ``checks`` in this process.
REGISTRY = Registry()


def verdict_of(
    rule: str, error: np.ndarray, allowed: np.ndarray, said: str, at: tuple[int, ...] = ()
) -> Verdict:
    """The worst of error / allowed; infinity where error is NaN, or nonzero and not allowed."""
    allowed = np.broadcast_to(allowed, error.shape)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.where(error == 0, 0, np.where(np.isnan(error), np.inf, error / allowed))
    if not ratio.size:
        return Verdict(rule, 0.0, detail=said)
    index = np.unravel_index(np.argmax(ratio), ratio.shape)
    return Verdict(rule, float(ratio[index]), 1.0, (*at, *map(int, index)), said)


def worst_of(verdicts: list[Verdict], rule: str) -> Verdict:
    """The verdict nearest to its limit, or farthest beyond; one that passes if there are none."""
    return max(verdicts, key=lambda verdict: verdict.ratio, default=Verdict(rule, 0.0))

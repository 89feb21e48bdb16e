"""Terms: the changes that features make to scores and weights, in the order of ``FEATURES``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..features.host import Given, HostPart, Kept, Partial, ScorePlace
from ..features.use import Use
from ..planning.problem import AttentionProblem
from .blocks import Array

__all__ = ["Terms", "terms_of"]


@dataclass(frozen=True)
class Terms:
    """The terms of a call, with their arguments."""

    parts: tuple[tuple[HostPart, Given], ...]
    summed: tuple[Partial, Given] | None = (
        None  # the term whose number for each head gets a gradient
    )
    dropped: tuple[Kept, Given] | None = None  # the feature that drops weights

    def __bool__(self) -> bool:
        """Whether some term changes scores."""
        return bool(self.parts)

    @property
    def have_slopes(self) -> bool:
        """Whether some term's slope may differ from 1.

        The part that all keys have in common is then not subtracted from them.
        """
        return any(part.with_slope is not None for part, _ in self.parts)

    def partial(self, place: ScorePlace) -> Array | None:
        """The derivative of scores by the term's number for their head; None without a gradient."""
        if self.summed is None:
            return None
        of_pairs, given = self.summed
        return of_pairs(place, given)

    def kept(self, place: ScorePlace) -> Array | None:
        """The pairs that keep their weights; None where all do."""
        if self.dropped is None:
            return None
        pairs, given = self.dropped
        return pairs(place, given)

    @property
    def inverse_keep(self) -> float:
        """The factor of the kept weights."""
        return 1.0 if self.dropped is None else float(self.dropped[1]["inverse_keep"])

    def apply(self, scores: Array, place: ScorePlace) -> None:
        """Change scores in place."""
        for part, given in self.parts:
            if part.score is not None:
                part.score(scores, place, given)

    def apply_with_slopes(self, scores: Array, place: ScorePlace) -> Array | None:
        """Change scores in place; return the slopes of all terms together, None if they are 1."""
        slopes = None
        for part, given in self.parts:
            if part.with_slope is not None:
                slope = part.with_slope(scores, place, given)
                slopes = slope if slopes is None else slopes * slope
            elif part.score is not None:
                part.score(scores, place, given)
        return slopes


def terms_of(problem: AttentionProblem, arrays: Mapping[str, Array]) -> Terms:
    """The terms of a problem with their arguments; empty for a plain problem.

    Parameters
    ----------
    problem
        The problem; its uses hold the host parts, constants and numbers, and name the operands.
    arrays
        The arrays of features, by operand name.
    """
    used = [(use, use.host, _given(use, arrays)) for use in problem.uses if use.host is not None]
    summed = [(h.partial, given) for use, h, given in used if use.pair_sums and h.partial]
    dropped = [(host.kept, given) for _, host, given in used if host.kept]
    parts = tuple((host, given) for _, host, given in used if host.score)
    return Terms(parts, summed[0] if summed else None, dropped[0] if dropped else None)


def _given(use: Use, arrays: Mapping[str, Array]) -> Given:
    own = {operand.name: arrays[operand.name] for operand in use.operands}
    return {**dict(use.compiled), **dict(use.numbers), **own}

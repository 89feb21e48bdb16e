"""What features change of scores, one after the other, in the order of their table."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TypeAlias

from ..features.host import Given, HostPart, ScorePlace
from ..features.use import Use
from ..planning.problem import AttentionProblem
from .blocks import Array

__all__ = ["Terms", "terms_of"]

#: Terms of a call: each changes scores in place.
Terms: TypeAlias = tuple[Callable[[Array, ScorePlace], None], ...]


def terms_of(problem: AttentionProblem, arrays: Mapping[str, Array]) -> Terms:
    """The terms of a problem with what the call gives them; none of a plain one.

    Parameters
    ----------
    problem
        Its uses name constants, numbers and operands.
    arrays
        Of features, by operand name.
    """
    return tuple(
        functools.partial(_apply, use.host, _given(use, arrays))
        for use in problem.uses
        if use.host is not None
    )


def _given(use: Use, arrays: Mapping[str, Array]) -> Given:
    own = {operand.name: arrays[operand.name] for operand in use.operands}
    return {**dict(use.compiled), **dict(use.numbers), **own}


def _apply(part: HostPart, given: Given, scores: Array, place: ScorePlace) -> None:
    part.score(scores, place, given)

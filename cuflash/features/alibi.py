"""ALiBi: a score falls with the distance of its key, by a slope for every head.

Query i of head h is at key ``i + q_offset``; ``alibi_slopes[h] * abs(i + q_offset - j)`` is
subtracted from its score, after a softcap (Press et al. 2022, "Train Short, Test Long"). The
distance counts on both sides of the query, and slopes may have either sign.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ArgumentValueError
from ..planning.problem import MAX_SEQLEN
from .added import INVERSE_UNIT, inverse_unit
from .device import MAIN_KERNELS, DevicePart
from .feature import ArrayRule, Feature, Request
from .host import Given, HostPart, ScorePlace
from .use import Use

__all__ = ["ALIBI"]

_NAME = "alibi_slopes"
_DEVICE = DevicePart(
    kernels=MAIN_KERNELS,
    struct="AlibiParams",
    block=np.dtype(
        [
            (_NAME, np.uint64),
            ("pair_sums", np.uint64),
            INVERSE_UNIT[0],
            ("batch_stride", np.int64),
            ("position", np.int32),
            INVERSE_UNIT[1],
        ],
        align=True,
    ),
    seams=(("Score", "AlibiTerm<{alibi_dtype}, {alibi_summed}>"),),
    header="features/alibi.cuh",
)


def _distances(place: ScorePlace, given: Given) -> Any:
    return np.abs(place.i + given["position"] - place.j)


def _add(scores: Any, place: ScorePlace, given: Given) -> None:
    slopes = given[_NAME]
    of_head = slopes[place.head] if slopes.ndim == 1 else slopes[place.batch, place.head]
    scores -= of_head * _distances(place, given)


def _partial(place: ScorePlace, given: Given) -> Any:
    return -_distances(place, given)


def _use(request: Request) -> Use | None:
    slopes = request.operands.get(_NAME)
    if slopes is None:
        return None
    problem, position = request.problem, request.position
    if abs(position) > MAX_SEQLEN:
        raise ArgumentValueError(
            "q_offset", f"{position} with {_NAME}", f"{-MAX_SEQLEN} to {MAX_SEQLEN}"
        )
    if problem.sequences and not problem.most_queries and len(slopes.shape) > 1:
        expected = f"({problem.heads_q},): packed sequences share them"
        raise ArgumentValueError(_NAME, f"shape {slopes.shape}", expected)
    wanted = problem.operation == "backward" and _NAME in problem.wrt
    return Use(
        "alibi",
        _DEVICE,
        compiled=(("alibi_dtype", problem.storage), ("alibi_summed", int(wanted))),
        numbers=(
            ("batch_stride", problem.heads_q * (len(slopes.shape) - 1)),
            ("position", position),
            *inverse_unit(request, _NAME),
        ),
        operands=(slopes,),
        host=HostPart(_add, partial=_partial),
        pair_sums=_NAME if wanted else None,
        shown="alibi",
    )


ALIBI = Feature(
    "alibi",
    _use,
    _DEVICE,
    arrays={
        _NAME: ArrayRule(("batch", "heads_q"), ("compute",), differentiable=True, shared=("batch",))
    },
)

"""ALiBi: scores fall with the distance of their keys, by a slope of every head.

A score of query i of head h, which stands at key ``i + q_offset``, loses
``alibi_slopes[h] * abs(i + q_offset - j)`` before the softmax and after a
softcap (Press et al. 2022, "Train Short, Test Long"). The distance counts on
either side of the query, and slopes may have either sign.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ArgumentValueError
from ..planning.problem import MAX_SEQLEN
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
            ("inverse_unit", np.float64),
            ("batch_stride", np.int64),
            ("position", np.int32),
            ("inverse_unit_single", np.float32),
        ],
        align=True,
    ),
    seams=(("Score", "AlibiTerm<{alibi_dtype}, {alibi_summed}>"),),
    header="features/alibi.cuh",
)

#: Where ``1 / unit``, times a slope and a distance, is far from the ends of float32.
_LEAST_UNIT, _MOST_UNIT = 2.0**-60, 2.0**60


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
    if problem.compute == "float32" and not _LEAST_UNIT <= problem.unit <= _MOST_UNIT:
        name = "softcap" if "softcap" in problem.features else "scale"
        raise ArgumentValueError(
            name, f"{problem.unit!r} with {_NAME}", f"{_LEAST_UNIT:.3g} to {_MOST_UNIT:.3g}"
        )
    wanted = problem.operation == "backward" and _NAME in problem.wrt
    inverse = 1 / problem.unit
    return Use(
        "alibi",
        _DEVICE,
        compiled=(("alibi_dtype", problem.storage), ("alibi_summed", int(wanted))),
        numbers=(
            ("inverse_unit", inverse),
            ("batch_stride", problem.heads_q * (len(slopes.shape) - 1)),
            ("position", position),
            ("inverse_unit_single", inverse),
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

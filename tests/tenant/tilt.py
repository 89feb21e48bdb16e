"""Tilt: a score falls or rises with the distance of its key, by a weight of its entry and head."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from cuflash.errors import ArgumentValueError, shown
from cuflash.features.device import MAIN_KERNELS, DevicePart
from cuflash.features.feature import ArrayRule, Feature, Request
from cuflash.features.host import Given, HostPart, ScorePlace
from cuflash.features.use import Use

__all__ = ["TILT"]

_DEVICE = DevicePart(
    kernels=MAIN_KERNELS,
    struct="TiltParams",
    block=np.dtype([("tilt", np.float64), ("weights", np.uint64)], align=True),
    seams=(("Score", "TiltTerm<{weights_dtype}>"),),
    text=Path(__file__).with_suffix(".cuh").read_text("utf-8"),
)


def _add(scores: Any, place: ScorePlace, given: Given) -> None:
    slopes = given["tilt"] * given["weights"].astype(scores.dtype)
    scores += slopes[place.batch, place.head] * (place.i - place.j)


def _check(name: str, value: Any) -> float:
    if type(value) is not float or not math.isfinite(value):
        raise ArgumentValueError(name, shown(value), "a finite float")
    return value


def _use(request: Request) -> Use | None:
    tilt, weights = request.keywords.get("tilt"), request.operands.get("weights")
    if tilt is None or weights is None:
        if tilt is None and weights is None:
            return None
        missing = "tilt" if tilt is None else "weights"
        raise ArgumentValueError(missing, "None", "tilt and weights together")
    return Use(
        "tilt",
        _DEVICE,
        compiled=(("weights_dtype", weights.dtype),),
        numbers=(("tilt", tilt),),
        operands=(weights,),
        host=HostPart(_add),
    )


TILT = Feature(
    "tilt",
    _use,
    keywords={"tilt": _check},
    arrays={"weights": ArrayRule(("batch", "heads_q"), ("storage", "compute"))},
)

"""Parity: a query sees only the keys at even positions, or only those at odd ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cuflash.errors import ArgumentValueError, shown
from cuflash.features.device import MAIN_KERNELS, DevicePart
from cuflash.features.feature import Feature, Request
from cuflash.features.host import Given, HostPart, ScorePlace
from cuflash.features.use import Use

__all__ = ["PARITY"]

_DEVICE = DevicePart(
    kernels=MAIN_KERNELS,
    struct="ParityParams",
    block=np.dtype([("parity", np.int64)], align=True),
    seams=(("Score", "ParityTerm"),),
    text=Path(__file__).with_suffix(".cuh").read_text("utf-8"),
)


def _hide(scores: Any, place: ScorePlace, given: Given) -> None:
    np.copyto(scores, -np.inf, where=place.j % 2 != given["parity"])


def _check(name: str, value: Any) -> int:
    if type(value) is not int or value not in (0, 1):
        raise ArgumentValueError(name, shown(value), "0 or 1")
    return value


def _use(request: Request) -> Use | None:
    if "parity" not in request.keywords:
        return None
    numbers = (("parity", request.keywords["parity"]),)
    return Use("parity", _DEVICE, numbers=numbers, host=HostPart(_hide))


PARITY = Feature("parity", _use, keywords={"parity": _check})

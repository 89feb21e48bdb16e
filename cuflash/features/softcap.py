"""Soft capping: scores approach a bound and do not exceed it.

With ``s = scale * q k^T`` the score is ``softcap * tanh(s / softcap)``. Masks come after it, so
hidden pairs stay hidden.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from ..errors import ArgumentTypeError, ArgumentValueError, shown
from ..planning.problem import DTYPES
from .device import MAIN_KERNELS, DevicePart
from .feature import Feature, Request
from .host import Given, HostPart, ScorePlace
from .use import Use

__all__ = ["SOFTCAP"]

_DEVICE = DevicePart(
    kernels=MAIN_KERNELS,
    struct="SoftcapParams",
    block=np.dtype(
        [("inner", np.float64), ("cap", np.float64), ("inner_single", np.float32)], align=True
    ),
    seams=(("Score", "SoftcapTerm<{softcap_dtype}>"),),
    header="features/softcap.cuh",
)


def _check(name: str, value: Any) -> float:
    """The cap; 0 for none."""
    expected = "a positive number; 0 or None for no cap"
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(name, shown(value), expected)
    try:
        cap = float(value)
    except OverflowError:
        cap = math.inf
    if not (math.isfinite(cap) and cap >= 0):
        raise ArgumentValueError(name, shown(value), expected)
    return cap


def _cap(scores: Any, _: ScorePlace, given: Given) -> None:
    scores /= given["cap"]
    np.tanh(scores, out=scores)
    scores *= given["cap"]


def _cap_with_slope(scores: Any, _: ScorePlace, given: Given) -> Any:
    scores /= given["cap"]
    e = np.exp(-2 * np.abs(scores))
    np.tanh(scores, out=scores)
    scores *= given["cap"]
    return 4 * e / (1 + e) ** 2  # 1 - tanh^2, which would cancel


def _use(request: Request) -> Use | None:
    cap = request.keywords.get("softcap")
    if not cap:
        return None
    problem = request.problem
    least, most = DTYPES[problem.storage].scales
    inner = problem.scale / cap
    if not (least <= cap <= most and least <= inner <= most):
        expected = f"it and scale / softcap from {least:.3g} to {most:.3g} for {problem.storage}"
        raise ArgumentValueError("softcap", f"{cap!r} with scale {problem.scale!r}", expected)
    return Use(
        "softcap",
        _DEVICE,
        compiled=(("softcap_dtype", problem.storage),),
        numbers=(("inner", inner), ("cap", cap), ("inner_single", inner)),
        host=HostPart(_cap, _cap_with_slope),
        unit=cap,
        shown=f"softcap {cap:g}",
    )


SOFTCAP = Feature("softcap", _use, _DEVICE, keywords={"softcap": _check})

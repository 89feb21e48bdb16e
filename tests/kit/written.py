"""Features of a case written as a function of scores, which must give the same results."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

import cuflash

from .case import Case

__all__ = ["WRITTEN", "given_to"]

#: Arrays that become arguments of the function.
WRITTEN = ("alibi_slopes", "bias", "mask")

_INDEX = {"b": "batch", "h": "head", "q": "i", "k": "j", "1": "0"}


def given_to(case: Case, placed: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of a call for the arrays of a case; ``placed`` are those on the computing device."""
    if not case.written:
        return dict(placed)
    arguments = {name: placed[name] for name in WRITTEN if name in placed}
    numbers = {"cap": case.softcap} if case.softcap else {}
    others = {name: array for name, array in placed.items() if name not in arguments}
    text = "\n".join(_lines(case))
    score_mod = cuflash.ScoreMod(text, numpy=_numpy_of(case), **numbers, **arguments)
    return {"score_mod": score_mod, **others}


def _lines(case: Case) -> list[str]:
    lines = ["Value t = s;"]
    if case.softcap:
        lines.append("t = p.cap * tanh(s / p.cap);")
    if case.alibi:
        slope = "p.alibi_slopes(batch, head)" if case.alibi == "batch" else "p.alibi_slopes(head)"
        lines.append(f"t -= {slope} * abs(i + offset - j);")
    if case.bias:
        lines.append(f"t += p.bias({_indices(case.bias_axes)});")
    if case.mask:
        lines.append(f"if (!p.mask({_indices(case.mask_axes)})) t = -infinity;")
    return [*lines, "return t;"]


def _indices(axes: str) -> str:
    return ", ".join(_INDEX[axis] for axis in axes)


@functools.lru_cache(maxsize=64)  # equal functions let the library repeat a call's decisions
def _numpy_of(case: Case) -> _NumpyFunction:
    return _NumpyFunction(case)


class _NumpyFunction:
    """The function of scores, for NumPy arrays."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __call__(self, s: Any, batch: Any, head: Any, i: Any, j: Any, offset: int, p: Any) -> Any:
        case, t = self.case, s
        index = {"b": batch, "h": head, "q": i, "k": j, "1": 0}
        if case.softcap:
            t = p.cap * np.tanh(s / p.cap)
        if case.alibi:
            which = (batch, head) if case.alibi == "batch" else (head,)
            t = t - p.alibi_slopes(*which) * np.abs(i + offset - j)
        if case.bias:
            t = t + p.bias(*(index[axis] for axis in case.bias_axes))
        if case.mask:
            t = np.where(p.mask(*(index[axis] for axis in case.mask_axes)), t, -np.inf)
        return t

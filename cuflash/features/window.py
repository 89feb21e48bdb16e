"""Sliding windows: a query's keys begin and end at fixed distances from its diagonal."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from ..errors import ArgumentTypeError, ArgumentValueError, shown
from ..planning.visibility import Bounds, bounds_that_hide, mask_of
from .device import MAIN_KERNELS, DevicePart
from .feature import Feature, Request
from .use import Use

__all__ = ["WINDOW", "bounds_of", "mask_of"]


def bounds_of(
    seqlen_q: int,
    seqlen_kv: int,
    causal: bool,
    q_offset: int | None,
    sides: tuple[int | None, int | None] | None,
    every: bool = False,
) -> Bounds:
    """The bounds of a call; sides may be negative.

    A bound that hides nothing becomes None. With ``every`` entries may have fewer queries and keys
    than the call, so a bound is None only if the call does not ask for it.

    Both are clamped to values at which every query sees nothing, and with ``every`` also to values
    at which every query of every entry sees all keys. With the longest sequences ``i + last + 1``
    and ``i + first`` then just fit in 32 bits.
    """
    offset = seqlen_kv - seqlen_q if q_offset is None else q_offset
    left, right = sides or (None, None)
    if causal:
        right = 0 if right is None else min(right, 0)
    first = None if left is None else min(seqlen_kv, offset - left)
    last = None if right is None else max(-seqlen_q, offset + right)
    if not every:
        return bounds_that_hide(seqlen_q, seqlen_kv, (first, last))
    first = None if first is None else max(first, -seqlen_q)
    return first, None if last is None else min(last, seqlen_kv)


def _check_sides(name: str, value: Any) -> tuple[int | None, int | None]:
    """The sides of a window: each a number of keys, or None for no bound."""
    expected = "(left, right), each a number of keys, or None for no bound (-1 in flash-attn)"
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ArgumentTypeError(name, shown(value), expected)
    for side in value:
        if side is None:
            continue
        if isinstance(side, (bool, np.bool_)) or not isinstance(side, numbers.Integral):
            raise ArgumentTypeError(name, shown(value), expected)
        if side < 0:
            raise ArgumentValueError(name, shown(value), expected)
    left, right = (None if side is None else int(side) for side in value)
    return left, right


_DEVICE = DevicePart(
    kernels=MAIN_KERNELS | {("steps", name) for name in ("statistics", "sink_gradient", "merge")},
    struct="WindowParams",
    block=np.dtype([("first", np.int64)], align=True),
    seams=(("Lengths", "WindowedLengths"),),
    header="features/window.cuh",
)


def _use(request: Request) -> Use | None:
    problem = request.problem
    if not problem.has_first:
        return None  # the bound on the last key is a parameter of every kernel
    return Use("window", _DEVICE, numbers=(("first", problem.q_first),))


WINDOW = Feature("window", _use, _DEVICE, keywords={"window_size": _check_sides})

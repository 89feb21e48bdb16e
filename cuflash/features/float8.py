"""Float8 caches: keys and values in one byte per number, times scales.

A stored number is a float8_e4m3fn (Micikevicius et al., "FP8 Formats for Deep
Learning", 2022): 448 is the largest, and the type has no infinity. A key or value is
the stored number times ``k_scale`` or ``v_scale``: one scale for all, or one for each
sequence and kv head. The function ``attention`` does not have these arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .device import DevicePart
from .feature import ArrayRule, Feature, Request
from .use import Use

__all__ = ["FLOAT8", "NAMES", "NUMBERS", "float8_use", "is_float8"]

#: Names of scales that are arrays, and keywords of scales that are numbers.
NAMES = "k_scale", "v_scale"
NUMBERS = {"k_scale": "k_number", "v_scale": "v_number"}

_DEVICE = DevicePart(
    kernels=frozenset((("fa2", "forward"), ("fa3", "forward"), ("steps", "append_kv"))),
    struct="Float8Params",
    block=np.dtype(
        [
            *((name, np.uint64) for name in NAMES),
            *((name, np.float32) for name in NUMBERS.values()),
            *((name, np.int32) for name in ("k_each", "v_each")),
        ],
        align=True,
    ),
    seams=(("Stored", "StoredInFloat8"), ("Score", "StoredKeysTerm")),
    header="features/float8.cuh",
)


def _number(_: str, value: Any) -> float:
    return float(value)


def _use(request: Request) -> Use | None:
    if not request.problem.float8:
        return None
    return float8_use(request.operands, request.keywords)


def float8_use(operands: Mapping[str, Any], numbers: Mapping[str, Any]) -> Use:
    """Return the use of the feature by a call with float8 caches.

    Parameters
    ----------
    operands
        Scales that are arrays, by name: one number, or (batch, heads_kv).
    numbers
        Scales that are numbers, by their keywords.
    """
    own = tuple(operands[name] for name in NAMES if name in operands)
    each = ((f"{one.name[0]}_each", int(len(one.shape) == 2)) for one in own)
    return Use(
        *("float8", _DEVICE),
        numbers=(*each, *((name, numbers[name]) for name in NUMBERS.values() if name in numbers)),
        operands=own,
        shown="float8 caches",
    )


def is_float8(given: Mapping[str, Any], keywords: Mapping[str, Any]) -> bool:
    """Return whether these arrays, by name, and keywords have scales of float8 caches."""
    return any(name in given or NUMBERS[name] in keywords for name in NAMES)


FLOAT8 = Feature(
    "float8",
    _use,
    _DEVICE,
    keywords=dict.fromkeys(NUMBERS.values(), _number),
    arrays={name: ArrayRule((), ("float32",), most_axes=2) for name in NAMES},
)

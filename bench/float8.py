"""Float8 numbers by their bits, because the array libraries of the device lack the type."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["bytes_of", "nearest"]

#: The least normal number, and the step below it.
_LEAST, _STEP = 2.0**-6, 2.0**-9
_MOST = 448.0


def nearest(x: Any, xp: Any) -> Any:
    """Float32 numbers rounded to the nearest float8_e4m3fn number, ties to even, in float32."""
    bits = x.view(xp.uint32)
    usual = (((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) << 20).view(xp.float32)
    small = xp.rint(x / _STEP).astype(xp.float32) * np.float32(_STEP)
    return xp.clip(xp.where(abs(x) < _LEAST, small, usual), -_MOST, _MOST).astype(xp.float32)


def bytes_of(x: Any, xp: Any) -> Any:
    """The bytes of float8 numbers that are given in float32."""
    bits = x.view(xp.uint32)
    usual = ((bits & 0x7FFFFFFF) >> 20).astype(xp.int32) - (127 - 7) * 8
    small = xp.rint(abs(x) / _STEP).astype(xp.int32)
    sizes = xp.where(abs(x) < _LEAST, small, usual)
    return (sizes.astype(xp.uint32) | ((bits >> 24) & 0x80)).astype(xp.uint8)

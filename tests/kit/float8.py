"""Bytes of float8 caches: numbers for used slots, and NaN for all others."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["SCALES", "bytes_of_numbers", "poisoned", "scales_of"]

#: Kinds of a pair of scales: two numbers, arrays of one, arrays of each sequence and head, or an
#: array and a number.
SCALES = "numbers", "ones", "each", "mixed"


def bytes_of_numbers(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Numbers about as large as a normal deviate; sometimes any number of the type."""
    usual = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    small = rng.integers(0, 16, shape, np.uint8) | rng.choice([0, 128], shape).astype(np.uint8)
    return np.where(rng.random(shape) < 0.1, small, usual).astype(np.uint8)


def poisoned(rng: np.random.Generator, size: int) -> Any:
    """Bytes that are NaN, of either sign."""
    return rng.choice(np.array([0x7F, 0xFF], np.uint8), size)


def scales_of(kind: str, rng: np.random.Generator, batch: int, heads: int) -> dict[str, Any]:
    """Scales of a kind, all different, none of them a power of two."""
    if not kind:
        return {}
    given: dict[str, Any] = {}
    for name, least in (("k_scale", 0.3), ("v_scale", 1.7)):
        if kind == "each" or (kind == "mixed" and name == "v_scale"):
            given[name] = rng.uniform(least, 2 * least, (batch, heads)).astype(np.float32)
        elif kind == "ones":
            given[name] = np.array([rng.uniform(least, 2 * least)], np.float32)
        else:
            given[name] = float(np.float32(rng.uniform(least, 2 * least)))
    return given

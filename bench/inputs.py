"""The arrays of a case."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from .cases import Case

__all__ = ["Inputs", "array_module", "make_inputs", "widened"]


@dataclass(frozen=True)
class Inputs:
    """The arrays of a case, (batch, seqlen, heads, head_dim), all on the device or all not."""

    q: Any
    k: Any
    v: Any
    dout: Any


def array_module(array: Any) -> Any:
    """NumPy for its arrays, else CuPy."""
    if isinstance(array, np.ndarray):
        return np
    import cupy

    return cupy


def widened(array: Any) -> Any:
    """An array in float64."""
    if array.dtype == ml_dtypes.bfloat16:
        xp = array_module(array)  # bfloat16 is the upper half of a float32
        array = (array.view(xp.uint16).astype(xp.uint32) << 16).view(xp.float32)
    return array.astype(np.float64)


def make_inputs(case: Case, xp: Any) -> Inputs:
    """Standard normal arrays, the same in every run, of CuPy or of NumPy."""
    generator = xp.random.default_rng(1)
    drawn = np.float64 if case.dtype == "float64" else np.float32
    dtype = ml_dtypes.bfloat16 if case.dtype == "bfloat16" else case.dtype

    def normal(seqlen: int, heads: int, dim: int) -> Any:
        shape = (case.batch, seqlen, heads, dim)
        return generator.standard_normal(shape, dtype=drawn).astype(dtype)

    return Inputs(
        normal(case.seqlen_q, case.heads_q, case.head_dim),
        normal(case.seqlen_kv, case.heads_kv, case.head_dim),
        normal(case.seqlen_kv, case.heads_kv, case.head_dim_v),
        normal(case.seqlen_q, case.heads_q, case.head_dim_v),
    )

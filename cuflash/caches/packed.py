"""Packed queries of calls with caches: the rows of all entries one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays.spec import TensorSpec
from ..errors import ArgumentTypeError, ArgumentValueError, shown
from ..features.packed_queries import NAME as OFFSETS
from ..planning.problem import MAX_SEQLEN

__all__ = [
    "ARGUMENT",
    "OFFSETS",
    "check_most",
    "check_offsets",
    "check_targets",
    "rows_of_entries",
    "with_batch_axis",
    "without_batch_axis",
]

#: The array of offsets as callers name it.
ARGUMENT = "cu_seqlens_q"
_LONGEST = "max_seqlen_q"

_Array = NDArray[Any]


def check_most(value: Any, packed: bool, where: int | None) -> int:
    """Return the most queries of an entry; 0 if queries are not packed.

    Calls with host arrays may leave ``max_seqlen_q`` out.

    Parameters
    ----------
    value
        ``max_seqlen_q`` as it was given.
    packed
        Whether there are offsets.
    where
        The CUDA device of the arrays; None for host memory.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If it is missing, is not a number of queries, or is given without offsets.
    """
    if not packed:
        if value is not None:
            raise ArgumentValueError(_LONGEST, shown(value), f"None without {ARGUMENT}")
        return 0
    if value is None and where is None:
        return MAX_SEQLEN
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        said = "an int, the most queries of an entry: the host does not read offsets on the device"
        raise ArgumentTypeError(_LONGEST, shown(value), said)
    if not 0 <= value <= MAX_SEQLEN:
        raise ArgumentValueError(_LONGEST, shown(value), f"0 to {MAX_SEQLEN}")
    return max(1, int(value))


def check_offsets(spec: TensorSpec) -> int:
    """Return the number of entries that the offsets describe.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If the array cannot hold offsets.
    """
    if spec.dtype != "int32":
        raise ArgumentTypeError(ARGUMENT, f"dtype {spec.dtype}", "int32")
    if len(spec.shape) != 1 or spec.shape[0] < 2:
        raise ArgumentValueError(
            ARGUMENT, f"shape {spec.shape}", "(batch + 1,), with a batch of 1 or more"
        )
    if not (spec.is_contiguous and spec.rows_are_unit and spec.whole_elements):
        got = f"strides of {spec.strides} elements"
        raise ArgumentValueError(ARGUMENT, got, "neighbouring elements")
    return spec.shape[0] - 1


def check_targets(specs: Mapping[str, TensorSpec]) -> None:
    """Check that destinations have the rows of q, without a batch axis.

    Raises
    ------
    ArgumentValueError
        If one does not; the error names it.
    """
    rows, heads = specs["q"].shape[:2]
    shapes = {"out": (rows, heads, specs["v_cache"].shape[3]), "lse_out": (heads, rows)}
    for name, wanted in shapes.items():
        if name in specs and specs[name].shape != wanted:
            expected = f"{wanted}, the rows of q packed"
            raise ArgumentValueError(name, f"shape {specs[name].shape}", expected)


def with_batch_axis(spec: TensorSpec) -> TensorSpec:
    """Return the description of an array as the only entry of a batch."""
    strides = None if spec.strides is None else (0, *spec.strides)
    return replace(spec, shape=(1, *spec.shape), strides=strides)


def without_batch_axis(spec: TensorSpec) -> TensorSpec:
    """Return the description of the only entry of a batch."""
    return replace(spec, shape=spec.shape[1:], strides=spec.strides and spec.strides[1:])


def rows_of_entries(offsets: _Array, total: int) -> list[slice]:
    """Return the rows of every entry on the host, then the rows that no entry has.

    The first entry begins at row 0. An offset that is below the one before it, or
    outside of the array, counts as the nearest valid offset.
    """
    ends = np.maximum.accumulate(np.clip(offsets[1:].astype(np.int64), 0, total))
    begins = [0, *ends.tolist()]
    return [slice(*pair) for pair in zip(begins, [*ends.tolist(), total], strict=True)]

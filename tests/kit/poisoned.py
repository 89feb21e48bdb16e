"""Inputs of a case with NaN in all rows that do not count, for used lengths."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .case import Case

__all__ = ["without"]

_OF_KEYS = ("k", "v")


def without(
    case: Case, arrays: Mapping[str, np.ndarray], value: float = np.nan
) -> dict[str, np.ndarray]:
    """The arrays with another value wherever it must not affect results.

    Parameters
    ----------
    case : Case
        Without used lengths the arrays do not change.
    arrays : mapping
        Inputs and results of the case by name, in its layout. In a broadcast array only those
        elements change that count for none of the entries that share them. In a mask they become
        True.
    value : float
        The planted value.
    """
    if not case.used:
        return dict(arrays)
    return {name: _changed(case, name, array, value) for name, array in arrays.items()}


def _changed(case: Case, name: str, array: np.ndarray, value: float) -> np.ndarray:
    if name in ("bias", "mask"):
        return _changed_pairs(case, name, array, value)
    if name not in ("q", "k", "v", "dout", "out", "lse", "dlse"):
        return array
    counts = case.keys_count() if name in _OF_KEYS else case.queries_count()
    if _is_shared(case, name):
        counts = np.broadcast_to(counts.any(axis=0), counts.shape)
    changed = array.copy()
    rows = case.heads_first(name, changed)
    np.moveaxis(rows, 1, 2)[~counts] = value
    return changed


def _is_shared(case: Case, name: str) -> bool:
    """Whether all entries share their memory."""
    return "b" in case.layout and case.layout.index("b") in case.recipe(name).broadcast


def _changed_pairs(case: Case, name: str, array: np.ndarray, value: float) -> np.ndarray:
    counts = case.queries_count()[:, None, :, None] & case.keys_count()[:, None, None]
    own = (1,) * (4 - array.ndim) + array.shape
    over = tuple(axis for axis, size in enumerate(own) if size == 1)
    some = np.broadcast_to(counts.any(axis=over, keepdims=True), own).reshape(array.shape)
    return np.where(some, array, True if name == "mask" else value).astype(array.dtype)

"""Rotary position embedding of rows on the host (Su et al. 2021, "RoFormer")."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["rotate"]

_Array = NDArray[Any]


def rotate(x: _Array, positions: _Array, cos: _Array, sin: _Array, interleaved: bool) -> _Array:
    """Return rows rotated by the angles of their positions, rounded once.

    Parameters
    ----------
    x
        (..., heads, head_dim).
    positions
        (...), integers. A row whose position is beyond the tables becomes NaN in the
        rotated columns.
    cos, sin
        (positions, pairs), in the dtype of the computation.
    interleaved
        Whether pair i has the columns 2i and 2i + 1; otherwise i and pairs + i. The
        columns after 2 * pairs do not change.

    Returns
    -------
    ndarray
        Like ``x``.

    Notes
    -----
    ``(x, y)`` becomes ``(x cos - y sin, x sin + y cos)``; products are rounded
    before they are added, as on the device.
    """
    pairs = cos.shape[1]
    first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    if interleaved:
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    known = (positions >= 0) & (positions < len(cos))
    rows = np.where(known, positions, 0)
    turned = np.array(x, order="C")
    if not turned.size or not pairs:
        return turned
    if not len(cos):
        turned[..., : 2 * pairs] = np.nan
        return turned
    c, s = cos[rows][..., None, :], sin[rows][..., None, :]
    a, b = (x[..., half].astype(cos.dtype) for half in (first, second))
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        turned[..., first] = a * c - b * s
        turned[..., second] = a * s + b * c
    turned[~known, :, : 2 * pairs] = np.nan
    return turned

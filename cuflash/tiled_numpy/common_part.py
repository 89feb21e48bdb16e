"""What all keys of a head have in common, taken off before anything is computed.

Adding one vector c to every key adds q c to all scores of a row, which the
softmax takes off again. In the arithmetic of a computer it stays: scores are
rounded by their size, and dQ = dS K multiplies c by a sum of dS that is zero
only where the weights, the log-sum-exp and delta agree to the last bit. Those
of another pass, or of another backend, do not. Without c neither matters.
"""

from __future__ import annotations

import numpy as np

from .blocks import Array

__all__ = ["common_part", "row_shift"]

#: Keys that are looked at before all of them are.
_SAMPLE = 16


def common_part(keys: Array, seen: int) -> Array | None:
    """A vector whose subtraction makes no component of any key larger in magnitude.

    Where all keys have the same sign in a component: the mean, or twice the
    smallest magnitude if that is less. Elsewhere 0. So the bound on a score's
    rounding never becomes worse, whatever else the keys hold. Under a causal
    mask a later key may so change the rounding of an earlier row.

    Parameters
    ----------
    keys
        (batch, head, key, width) of the compute dtype.
    seen
        How many of the first keys the mask shows to any query; others do not count.

    Returns
    -------
    ndarray or None
        (batch, head, 1, width); None where it would be zero.
    """
    shown = keys[:, :, :seen]
    if 0 in shown.shape:
        return None
    sample = shown[:, :, :: max(1, seen // _SAMPLE)]
    if not (sample.min(axis=2) * sample.max(axis=2) > 0).any():
        return None
    low, high = shown.min(axis=2, keepdims=True), shown.max(axis=2, keepdims=True)
    least = np.maximum(low, -high)  # negative where the signs differ
    mean = shown.mean(axis=2, keepdims=True)
    size = np.minimum(np.abs(mean), 2 * least)
    part: Array = np.where((least > 0) & np.isfinite(size), np.copysign(size, mean), 0)
    part = part.astype(keys.dtype, copy=False)
    return part if part.any() else None


def row_shift(rows: Array, part: Array) -> Array:
    """``rows @ part`` (batch, head, row) in more digits than the rows have; 0 of heads without."""
    wide = np.float64 if rows.dtype == np.float32 else np.longdouble
    shift: Array = np.einsum("bhrw,bhw->bhr", rows.astype(wide), part[:, :, 0].astype(wide))
    shift[~part.any(axis=(2, 3))] = 0
    return shift

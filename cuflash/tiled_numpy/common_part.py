"""The component that all keys of a head share is subtracted before anything is computed.

Adding one vector c to every key adds q c to all scores of a row, which the softmax cancels. In
floating point it does not cancel: scores are rounded relative to their size, and dQ = dS K
multiplies c by a sum of dS that is zero only if the weights, the log-sum-exp and delta agree to the
last bit. From another pass or another backend they do not. Without c both errors vanish.
"""

from __future__ import annotations

import numpy as np

from .blocks import Array
from .steps import wider

__all__ = ["common_part", "row_shift"]

#: The number of keys that are inspected before all of them are.
_SAMPLE = 16


def common_part(keys: Array) -> Array | None:
    """A vector whose subtraction makes no component of any key larger in magnitude.

    Where all keys have the same sign in a component, it is the mean, or twice the smallest
    magnitude if that is less; elsewhere it is 0. The bound on a score's rounding therefore never
    becomes worse, whatever else the keys hold. Under a mask, a key may change the rounding of a row
    that does not see it.

    Parameters
    ----------
    keys
        (batch, head, key, width) of the compute dtype: the keys that some query sees.

    Returns
    -------
    ndarray or None
        (batch, head, 1, width); None if it would be zero.
    """
    if 0 in keys.shape:
        return None
    sample = keys[:, :, :: max(1, keys.shape[2] // _SAMPLE)]
    if not (sample.min(axis=2) * sample.max(axis=2) > 0).any():
        return None
    low, high = keys.min(axis=2, keepdims=True), keys.max(axis=2, keepdims=True)
    least = np.maximum(low, -high)  # negative where the signs differ
    mean = keys.mean(axis=2, keepdims=True)
    size = np.minimum(np.abs(mean), 2 * least)
    part: Array = np.where((least > 0) & np.isfinite(size), np.copysign(size, mean), 0)
    part = part.astype(keys.dtype, copy=False)
    return part if part.any() else None


def row_shift(rows: Array, part: Array) -> Array:
    """``rows @ part`` (batch, head, row) in a wider type than the rows; 0 without a part."""
    wide = wider(rows.dtype)
    shift: Array = np.einsum("bhrw,bhw->bhr", rows.astype(wide), part[:, :, 0].astype(wide))
    shift[~part.any(axis=(2, 3))] = 0
    return shift

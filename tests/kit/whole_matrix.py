"""Attention on whole matrices in the precision of its arrays, as a user would write it.

Where rounding is large, tests compare with it: a tiled pass must be about as accurate.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["error", "gradients"]


def gradients(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dout: np.ndarray,
    causal: bool = False,
    operands: Any = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dq, dk and dv of arrays (batch, seqlen, heads, width), all with the same number of heads.

    ``operands`` is the 16-bit type to which P and dS are rounded before products, as for tensor
    cores.
    """
    q, k, v, dout = (a.swapaxes(1, 2) for a in (q, k, v, dout))
    scale = q.dtype.type(q.shape[-1] ** -0.5)
    scores = (q * scale) @ k.swapaxes(-1, -2)
    if causal:
        rows, columns = scores.shape[-2:]
        seen = np.arange(columns) <= np.arange(rows)[:, None] + columns - rows
        scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    dv = _rounded(weights, operands).swapaxes(-1, -2) @ dout
    delta = ((weights @ v) * dout).sum(-1, keepdims=True)
    dscores = _rounded(weights * (dout @ v.swapaxes(-1, -2) - delta), operands)
    dq, dk = dscores @ k * scale, dscores.swapaxes(-1, -2) @ (q * scale)
    return dq.swapaxes(1, 2), dk.swapaxes(1, 2), dv.swapaxes(1, 2)


def _rounded(array: np.ndarray, dtype: Any) -> np.ndarray:
    return array if dtype is None else array.astype(dtype).astype(array.dtype)


def error(found: np.ndarray, truth: np.ndarray) -> float:
    """The norm of the difference over that of the truth."""
    truth = truth.astype(np.longdouble)
    return float(np.linalg.norm(found.astype(np.longdouble) - truth) / np.linalg.norm(truth))

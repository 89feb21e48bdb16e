"""The work on one tile; the algorithms differ in its order.

Tiles of scores are transposed, [key, row]. The maximum over keys and the differences from a row's
statistics then run along long contiguous lines, which NumPy does in half the time of many short
reductions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .blocks import Array, Scratch

__all__ = [
    "RowState",
    "accumulate",
    "finish",
    "multiply",
    "online_softmax",
    "sum_over_keys",
    "transposed_product",
    "wider",
]

#: The number of terms summed in sequence; 1024 would cost half of float32's accuracy.
_TERMS_SUMMED = 64
#: The widest product whose terms are added in parts; a wider one costs BLAS more in parts.
_NARROW = 16


def wider(dtype: np.dtype[Any]) -> type[np.floating[Any]]:
    """A wider type, for the few numbers per row that need it."""
    return np.float64 if dtype == np.float32 else np.longdouble


@dataclass
class RowState:
    """The state of rows between their tiles; every array begins with (batch, head, row)."""

    out: Array
    row_max: Array
    row_sum: Array

    @classmethod
    def start(cls, shape: tuple[int, ...], dtype: np.dtype[Any]) -> RowState:
        """Rows (batch, head, row, width) that have seen no key."""
        return cls(
            np.zeros(shape, dtype), np.full(shape[:-1], -np.inf, dtype), np.zeros(shape[:-1], dtype)
        )

    def part(self, rows: slice) -> RowState:
        """Some of the rows, as views."""
        return RowState(self.out[:, :, rows], self.row_max[:, :, rows], self.row_sum[:, :, rows])


def transposed_product(keys: Array, rows: Array, scratch: Scratch, name: str) -> Array:
    """``keys @ rows.T`` of every head, [key, row]: K Q^T or V dO^T of a tile."""
    product = scratch.array(name, (*keys.shape[:3], rows.shape[2]))
    np.matmul(keys, rows.swapaxes(-1, -2), out=product)
    return product


def accumulate(total: Array, left: Array, right: Array, scratch: Scratch, first: bool) -> None:
    """Add ``left @ right`` to the total, or start the total with it."""
    product = total if first else scratch.array("product", total.shape)
    multiply(left, right, product, scratch)
    if not first:
        total += product


def multiply(left: Array, right: Array, product: Array, scratch: Scratch) -> None:
    """``left @ right``, with the terms of narrow products added in parts.

    BLAS adds the terms of such a product in sequence if the left matrix is transposed, and in
    several sums if it is not. In parts the error is as small in both cases, and the time is the
    same.
    """
    terms, width = right.shape[-2:]
    if width > _NARROW or terms <= _TERMS_SUMMED:
        np.matmul(left, right, out=product)
        return
    count = terms // _TERMS_SUMMED
    whole = count * _TERMS_SUMMED
    lefts = left[..., :whole].reshape(*left.shape[:-1], count, _TERMS_SUMMED).swapaxes(-2, -3)
    rights = right[..., :whole, :].reshape(*right.shape[:-2], count, _TERMS_SUMMED, width)
    shape = (*product.shape[:-2], count, *product.shape[-2:])
    parts = np.matmul(lefts, rights, out=scratch.array("parts", shape))
    parts.sum(axis=-3, out=product)
    if whole < terms:
        product += np.matmul(left[..., whole:], right[..., whole:, :])


def online_softmax(scores: Array, state: RowState) -> Array:
    """Exponentiate scores relative to the new maximum; update maximum and sum.

    Parameters
    ----------
    scores
        (batch, head, key, row); replaced by exp(scores - new maximum).
    state
        The rows; ``out`` does not change.

    Returns
    -------
    ndarray
        (batch, head, row), exp(old maximum - new maximum): the factor of earlier weights.
    """
    new_max = np.maximum(scores.max(axis=-2), state.row_max)
    # Minus infinity less itself is NaN; less a finite number it is unchanged.
    shift = np.where(new_max == -np.inf, 0, new_max)
    scores -= shift[:, :, None]
    np.exp(scores, out=scores)
    rescale: Array = np.exp(state.row_max - shift)
    state.row_sum *= rescale
    state.row_sum += sum_over_keys(scores)
    state.row_max[...] = new_max
    return rescale


def sum_over_keys(weights: Array) -> Array:
    """Add sums of a few keys: the error grows with the keys of a sum and with the number of sums.

    A product with ones takes half the time of ``add.reduce`` over lines.
    """
    batch, heads, width, rows = weights.shape
    ones = np.ones((1, _TERMS_SUMMED), weights.dtype)
    count = width // _TERMS_SUMMED
    whole = count * _TERMS_SUMMED
    parts = weights[:, :, :whole].reshape(batch, heads, count, _TERMS_SUMMED, rows)
    total: Array = np.matmul(ones, parts)[:, :, :, 0].sum(axis=2)
    if whole < width:
        total += np.matmul(ones[:, : width - whole], weights[:, :, whole:])[:, :, 0]
    return total


def finish(state: RowState, shift: Array | None, sinks: Array | None = None) -> Array:
    """Make the output of dead rows exactly zero; return the log-sum-exp of all rows.

    Parameters
    ----------
    state
        The rows after their last tile, normalised by their sums.
    shift
        The numbers by which a common part of the keys has lowered the scores (:func:`row_shift`).
    sinks
        (batch, head, row): one more logit of every row, with a value of zero.
    """
    dead = state.row_sum == 0
    lse: Array = state.row_max + np.log(state.row_sum)
    if shift is not None:
        lse = (lse + shift).astype(lse.dtype)
    if sinks is not None:
        lse = _join_sinks(state, lse, shift, sinks)
    if dead.any():
        state.out[dead] = 0
    return lse


def _join_sinks(state: RowState, lse: Array, shift: Array | None, sinks: Array) -> Array:
    """Give every row's sink its weight; return the new log-sum-exp.

    The weight of the sink is exp of a difference, so both sides need more digits than large scores
    have.
    """
    wide = wider(lse.dtype)
    of_keys = state.row_max.astype(wide) + np.log(state.row_sum.astype(wide))
    if shift is not None:
        of_keys += shift
    total = np.logaddexp(of_keys, sinks)
    state.out *= np.exp(of_keys - total)[..., None].astype(lse.dtype)
    without = sinks == -np.inf
    joined: Array = np.where(without, lse, total).astype(lse.dtype)
    return joined

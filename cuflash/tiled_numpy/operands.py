"""Keys and values of some heads, shared by the tasks that compute with them."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from ..planning.tiles.host import FEW_ROWS
from .blocks import Array, Blocks, Tile
from .common_part import common_part
from .heads import Heads
from .steps import sum_over_keys
from .terms import Terms

__all__ = ["Operands", "longest_norm"]


@dataclass(frozen=True)
class _Range:
    """Where exp of a score, times a value, is an ordinary number without a maximum taken off."""

    score: float
    least: float  # of the largest value of a column
    most: float


_RANGES = {
    "float32": _Range(24.0, 1e-20, 1e20),
    "float64": _Range(200.0, 1e-150, 1e150),
}


class Operands:
    """Made by the first task that asks, while the others wait for it.

    Attributes
    ----------
    keys, values
        (batch, head, key, width) as BLAS reads them, in the compute dtype.
        Keys are without their common part. In what is a copy, keys that no
        query sees are undefined.
    common
        That part, (batch, head, 1, width), or None.
    """

    keys: Array
    values: Array
    common: Array | None

    def __init__(
        self, blocks: Blocks, heads: Heads, q: Array, k: Array, v: Array, terms: Terms
    ) -> None:
        self._blocks, self._heads, self._terms = blocks, heads, terms
        self._given = q, k, v
        self._lock = threading.Lock()
        self._made = False
        self._longest_row: float | None = None

    def make(self) -> Operands:
        """Have everything there; returns itself."""
        with self._lock:
            if not self._made:
                self._make(*self._given)
                self._made = True
        return self

    def change(self, scores: Array, tile: Tile) -> None:
        """Products ``scale * q k^T`` -> scores: what features change, then what the mask hides.

        Scores are (batch, head, key, row). What is hidden becomes minus infinity.
        """
        if self._terms:
            self._terms.apply(self._by_group(scores, tile), self._heads.place(tile))
        self._blocks.apply_mask(scores, tile)

    def change_with_slopes(self, scores: Array, tile: Tile) -> Array | None:
        """The same for the backward pass; the slopes of scores, None if they are 1."""
        slopes = None
        if self._terms:
            by_group = self._by_group(scores, tile)
            slopes = self._terms.apply_with_slopes(by_group, self._heads.place(tile))
        self._blocks.apply_mask(scores, tile)
        return None if slopes is None else slopes.reshape(scores.shape)

    def kept(self, tile: Tile) -> Array | None:
        """The pairs of a tile, (batch, head, key, row), that keep their weights; None if all do."""
        kept = self._terms.kept(self._heads.place(tile))
        if kept is None:
            return None
        batch, heads, keys, group, queries = kept.shape
        return kept.reshape(batch, heads, keys, group * queries)

    @property
    def inverse_keep(self) -> float:
        """What the weights that are kept are multiplied by."""
        return self._terms.inverse_keep

    def drop(self, weights: Array, tile: Tile) -> None:
        """Leave out of a tile's weights, (batch, head, key, row), what is dropped."""
        kept = self.kept(tile)
        if kept is not None:
            np.copyto(weights, 0, where=~kept)

    def sums_of_pairs(self, gradients: Array, tile: Tile) -> Array | None:
        """Of every row (batch, head, row) the sum over the keys of dS times what has a gradient.

        ``gradients`` are of the scores that enter the softmax, (batch, head, key, row).
        """
        partial = self._terms.partial(self._heads.place(tile))
        if partial is None:
            return None
        products = self._by_group(gradients, tile) * partial.astype(gradients.dtype)
        return sum_over_keys(products.reshape(gradients.shape))

    def _by_group(self, scores: Array, tile: Tile) -> Array:
        group, length = self._blocks.problem.group, tile.queries.stop - tile.queries.start
        return scores.reshape(*scores.shape[:3], group, length)

    def _make(self, q: Array, k: Array, v: Array) -> None:
        problem, seen = self._blocks.problem, self._blocks.seen_keys
        self.keys, self.values = self._heads.keys(k), self._heads.keys(v)
        self.common = None
        rows = problem.group * problem.seqlen_q
        # Of few rows it costs more to take off than the products; only gradients need it. A term
        # that is a function of the scores needs them whole.
        wanted = problem.operation == "backward" or rows > FEW_ROWS
        if wanted and not self._terms.have_slopes:
            self.common = common_part(self.keys[:, :, seen])
        if self.common is not None:
            # An infinity times a key keeps its sign: heads whose queries have one stay as they are.
            finite = self._heads.finite(q)[..., None, None]
            self.common = np.where(finite, self.common, 0) if finite.any() else None
        if self.common is not None:
            less = np.empty(self.keys.shape, self.keys.dtype)
            np.subtract(self.keys[:, :, seen], self.common, out=less[:, :, seen])
            self.keys = less

    @property
    def longest_row(self) -> float:
        """The norm of a row of queries up to which no score needs its row's maximum.

        A score is at most the product of two norms (Cauchy and Schwarz).
        Negative where the values are too large or too small for that, or not
        finite, and where features change the scores.
        """
        with self._lock:
            if self._longest_row is None:
                self._longest_row = -1.0 if self._terms else self._measure()
            return self._longest_row

    def _measure(self) -> float:
        numbers, seen = _RANGES[self.keys.dtype.name], self._blocks.seen_keys
        keys, values = self.keys[:, :, seen], self.values[:, :, seen]
        if 0 in keys.shape or 0 in values.shape:
            return -1.0
        largest = np.maximum(values.max(axis=2), -values.min(axis=2))
        least = largest
        if self._blocks.problem.mask != "full":  # a row may see any one of the values alone
            least = np.abs(values)
        if (
            not ((least == 0) | (least >= numbers.least)).all()
            or not (largest <= numbers.most).all()
        ):
            return -1.0
        longest = longest_norm(keys)
        return numbers.score / longest if 0 < longest < np.inf else -1.0


def longest_norm(rows: Array) -> float:
    """The largest Euclidean norm of (batch, head, row, width); 0 of no rows."""
    return float(np.sqrt(np.einsum("bhrw,bhrw->bhr", rows, rows).max(initial=0)))

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
    """Bounds within which exp of a score, times a value, needs no maximum subtracted."""

    score: float
    least: float  # of the largest value of a column
    most: float


_RANGES = {
    "float32": _Range(24.0, 1e-20, 1e20),
    "float64": _Range(200.0, 1e-150, 1e150),
}


class Operands:
    """Keys and values, made by the first task that needs them while other tasks wait.

    Attributes
    ----------
    keys, values
        (batch, head, key, width) in a form that BLAS reads, in the compute dtype. Keys are without
        their common part. In copies, keys that no query sees are undefined.
    common
        The common part, (batch, head, 1, width), or None.
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
        """Make keys and values if they are not made yet; return this object."""
        with self._lock:
            if not self._made:
                self._make(*self._given)
                self._made = True
        return self

    def change(self, scores: Array, tile: Tile) -> None:
        """Turn products ``scale * q k^T`` into scores: apply features, then the mask.

        Scores are (batch, head, key, row). Hidden pairs become minus infinity.
        """
        if self._terms:
            self._terms.apply(self._by_group(scores, tile), self._heads.place(tile))
        self._blocks.apply_mask(scores, tile)

    def change_with_slopes(self, scores: Array, tile: Tile) -> Array | None:
        """Change scores for the backward pass; return their slopes, None if they are 1."""
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
        """The factor of the kept weights."""
        return self._terms.inverse_keep

    def drop(self, weights: Array, tile: Tile) -> None:
        """Clear the dropped weights of a tile, (batch, head, key, row)."""
        kept = self.kept(tile)
        if kept is not None:
            np.copyto(weights, 0, where=~kept)

    def sums_of_pairs(self, gradients: Array, tile: Tile) -> Array | None:
        """Sums over keys of dS times the derivative by a term's number, (batch, head, row).

        ``gradients`` are those of the scores that enter the softmax, (batch, head, key, row).
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
        # With few rows the subtraction costs more than the products, and only gradients need it. A
        # term that is a function of the scores needs scores with the common part.
        wanted = problem.operation == "backward" or rows > FEW_ROWS
        if wanted and not self._terms.have_slopes:
            self.common = common_part(self.keys[:, :, seen])
        if self.common is not None:
            # The subtraction may change the sign of a key, and so the sign of an infinite product:
            # heads whose queries hold an infinity are left unchanged.
            finite = self._heads.finite(q)[..., None, None]
            self.common = np.where(finite, self.common, 0) if finite.any() else None
        if self.common is not None:
            less = np.empty(self.keys.shape, self.keys.dtype)
            np.subtract(self.keys[:, :, seen], self.common, out=less[:, :, seen])
            self.keys = less

    @property
    def longest_row(self) -> float:
        """The largest norm of a row of queries for which no score needs its row's maximum.

        A score is at most the product of two norms (Cauchy and Schwarz). The result is negative if
        the values are too large or too small for that, or not finite, and if features change the
        scores.
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
        if self._blocks.problem.mask != "full":  # a row may see any single value
            least = np.abs(values)
        if (
            not ((least == 0) | (least >= numbers.least)).all()
            or not (largest <= numbers.most).all()
        ):
            return -1.0
        longest = longest_norm(keys)
        return numbers.score / longest if 0 < longest < np.inf else -1.0


def longest_norm(rows: Array) -> float:
    """The largest Euclidean norm of (batch, head, row, width); 0 without rows."""
    return float(np.sqrt(np.einsum("bhrw,bhrw->bhr", rows, rows).max(initial=0)))

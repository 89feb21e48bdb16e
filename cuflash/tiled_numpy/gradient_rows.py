"""The arrays of a backward pass, and the rows of a task."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .blocks import Array, Blocks, Tile
from .common_part import row_shift
from .heads import Heads
from .steps import wider

__all__ = ["ByRow", "Given", "GradientRows"]

#: The log-sum-exp of another pass may differ by this many roundings of a score, besides those of
#: the sum of head_dim products, whose number grows as the root of head_dim.
_ROUNDINGS = 4


@dataclass(frozen=True)
class Given:
    """The arrays of the call."""

    dout: Array
    q: Array
    k: Array
    v: Array
    out: Array
    lse: Array
    dlse: Array | None
    dq: Array | None  # None if unwanted, as are dk and dv
    dk: Array | None
    dv: Array | None
    sinks: Array | None
    more: Mapping[str, Array]  # of other features


@dataclass(frozen=True)
class ByRow:
    """Each row's contribution to gradients of features, (batch, heads_q, seqlen_q), or None."""

    sinks: Array | None = None
    pairs: Array | None = None  # to the term that has a number for each head


@dataclass
class GradientRows:
    """Folded rows of dQ and of the inputs that queries index; (batch, head, row, ...)."""

    scaled_q: Array
    dout: Array
    out: Array
    lse: Array
    dlse: Array | None
    dead: Array
    some_dead: bool
    sinks: Array | None = None  # less the shift of the scores by a common part
    dq: Array | None = None  # without the factor scale and the common part's contribution
    sums: Array | None = None  # of dS over the keys, if the keys had a common part
    same: Array | None = None  # rows whose given lse belongs to these keys
    centred: Array | None = None  # (batch, head): heads whose keys had a common part
    unrounded_lse: Array | None = None  # with sinks, if the keys had a common part
    pairs: Array | None = None  # sums over the keys for the gradient of a term
    of_keys: Array | None = None  # weight of all keys, with sinks and a common part

    @classmethod
    def load(cls, blocks: Blocks, heads: Heads, given: Given) -> GradientRows:
        """Copies in the compute dtype, with zeros in dead rows, which are not read."""
        scaled_q, dout, out = (heads.rows(array) for array in (given.q, given.dout, given.out))
        lse, unseeing = heads.statistics(given.lse), heads.dead()
        scaled_q *= blocks.problem.scale
        dead = lse == -np.inf
        if unseeing is not None:
            dead |= unseeing
        some_dead = bool(dead.any())
        if some_dead:
            for rows in (scaled_q, dout, out):
                rows[dead] = 0
        return cls(
            scaled_q=scaled_q,
            dout=dout,
            out=out,
            lse=lse,
            dlse=None if given.dlse is None else heads.statistics(given.dlse),
            dead=dead,
            some_dead=some_dead,
            sinks=None if given.sinks is None else heads.sinks(given.sinks),
            dq=None if given.dq is None else np.zeros_like(scaled_q),
        )

    def take_off(self, common: Array, own_lse: Array) -> None:
        """Replace the log-sum-exp by that of the keys without their common part.

        If the given value equals the row's own up to rounding, the own value replaces it, because
        it has more digits. Otherwise the given value less the shift of the scores is kept: it may
        cover more keys than these, and the weight of the other keys then exceeds the rounding.
        Heads whose keys have no common part keep the given value, whatever other heads have.
        """
        centred: Array = np.asarray(common.any(axis=(2, 3)))
        self.centred = centred
        shift = row_shift(self.scaled_q, common)
        given = self.lse - shift
        if self.sinks is not None:
            self.sinks = self.sinks - shift
            of_keys, own_lse = own_lse, np.logaddexp(own_lse, self.sinks)
            self.of_keys = np.exp(of_keys - own_lse).astype(self.lse.dtype)
        size = row_shift(np.abs(self.scaled_q), np.abs(common)) + np.abs(own_lse) + 1
        eps = np.finfo(self.lse.dtype).eps
        roundings = _ROUNDINGS + math.sqrt(common.shape[3])
        self.same = np.abs(given - own_lse) <= roundings * eps * size
        self.same &= centred[..., None]
        lse = np.where(self.dead, -np.inf, np.where(self.same, own_lse, given))
        if self.sinks is not None:
            self.unrounded_lse = lse
        self.lse = lse.astype(self.lse.dtype)
        self.sums = None if self.dq is None else np.zeros_like(self.lse)

    def clear_dead(self, scores: Array, tile: Tile) -> None:
        """Clear the dead rows of a tile, (batch, head, key, row)."""
        if self.some_dead:
            np.copyto(scores, 0, where=self.dead[:, :, None, tile.rows])

    def delta(self, rows: slice) -> Array:
        """rowsum(dO * O) - dlse of some rows."""
        delta: Array = np.einsum("bhrw,bhrw->bhr", self.dout[:, :, rows], self.out[:, :, rows])
        if self.dlse is not None:
            delta -= self.dlse[:, :, rows]
        return delta

    def of_sinks(self) -> Array:
        """Each row's contribution to the gradient of its sink: P (dlse - delta), P of the sink."""
        terms: Array = np.where(
            self.sinks == -np.inf, 0, -self._sink_weights() * self.delta(slice(None))
        )
        return terms

    def _sink_weights(self) -> Array:
        sinks = np.asarray(self.sinks, wider(self.lse.dtype))
        # A sink less itself is 0, or NaN if it is not finite: in a dead row it has all the weight.
        lse = self.lse if self.unrounded_lse is None else self.unrounded_lse
        weights: Array = np.exp(sinks - np.where(self.dead, sinks, lse))
        return weights.astype(self.lse.dtype)

    def _exact_sums(self) -> Array:
        """The exact sums of dS over the keys, for weights that belong to these keys.

        The sum is dlse. With a sink it is P D + W dlse, where P is the weight of the sink, W that
        of all keys, and D the sum of weights times dP. D comes from the computed sums, which lack W
        delta: delta itself would bring in the rounding of O. W comes from the scores: 1 - P would
        have no digits where P is almost 1.
        """
        none = np.zeros_like(self.lse)
        dlse = none if self.dlse is None else self.dlse
        if self.of_keys is None:
            return dlse
        products = np.asarray(self.sums) + self.of_keys * self.delta(slice(None))
        sums: Array = self._sink_weights() * products + self.of_keys * dlse
        return sums

    def store(self, blocks: Blocks, heads: Heads, dq: Array, common: Array | None) -> None:
        """Write dQ to its destination.

        The common part of the keys is multiplied by the sum of a row's dS. That sum is known
        exactly if the row's weights are its own; a computed sum would have an error that a large
        common part makes dominant.
        """
        if self.dq is None:
            return
        if common is not None and self.sums is not None and self.centred is not None:
            sums = np.where(np.asarray(self.same), self._exact_sums(), self.sums)
            of_common = sums[..., None] * common
            np.add(self.dq, of_common, out=self.dq, where=self.centred[..., None, None])
        self.dq *= blocks.problem.scale
        if self.some_dead:
            self.dq[self.dead] = 0
        heads.set_rows(dq, self.dq)

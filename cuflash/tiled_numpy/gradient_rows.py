"""The arrays of a backward pass, and the rows of a task."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .blocks import Array, Blocks
from .common_part import row_shift
from .heads import Heads

__all__ = ["Given", "GradientRows"]

#: Roundings of a score by which the log-sum-exp of another pass may differ.
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
    dq: Array
    dk: Array
    dv: Array


@dataclass
class GradientRows:
    """Folded rows of the inputs that queries index, and of dQ; (batch, head, row, ...)."""

    scaled_q: Array
    dout: Array
    out: Array
    lse: Array
    dlse: Array | None
    dead: Array
    some_dead: bool
    dq: Array  # less the factor scale, and what the common part of the keys gives
    sums: Array | None = None  # of dS over the keys, where the keys had a common part
    same: Array | None = None  # rows whose lse was that of these keys
    centred: Array | None = None  # (batch, head), heads whose keys had a common part

    @classmethod
    def load(cls, blocks: Blocks, heads: Heads, given: Given) -> GradientRows:
        """Copies in the compute dtype, with zeros in dead rows: whatever those hold is not read."""
        scaled_q, dout = heads.rows(given.q), heads.rows(given.dout)
        lse = heads.statistics(given.lse)
        scaled_q *= blocks.problem.scale
        dead = lse == -np.inf
        some_dead = bool(dead.any())
        if some_dead:
            scaled_q[dead] = 0
            dout[dead] = 0
        return cls(
            scaled_q=scaled_q,
            dout=dout,
            out=heads.rows(given.out),
            lse=lse,
            dlse=None if given.dlse is None else heads.statistics(given.dlse),
            dead=dead,
            some_dead=some_dead,
            dq=np.zeros_like(scaled_q),
        )

    def take_off(self, common: Array, own_lse: Array) -> None:
        """Have the log-sum-exp that belongs to keys without their common part.

        If the given value equals the row's own up to rounding, the own one is
        taken, which has more digits. Otherwise the given one is kept, less
        what the scores lack: the caller may have given that of more keys than
        these, whose weight then has to be larger than that rounding. Heads
        whose keys have nothing in common keep what was given, whatever other
        heads have.
        """
        centred: Array = np.asarray(common.any(axis=(2, 3)))
        self.centred = centred
        shift = row_shift(self.scaled_q, common)
        given = self.lse - shift
        size = row_shift(np.abs(self.scaled_q), np.abs(common)) + np.abs(own_lse) + 1
        eps = np.finfo(self.lse.dtype).eps
        self.same = np.abs(given - own_lse) <= _ROUNDINGS * eps * size
        self.same &= centred[..., None]
        lse = np.where(self.same, own_lse, given).astype(self.lse.dtype)
        self.lse = np.where(self.dead, -np.inf, lse).astype(lse.dtype)
        self.sums = np.zeros_like(self.lse)

    def delta(self, rows: slice) -> Array:
        """rowsum(dO * O) - dlse of some rows."""
        delta: Array = np.einsum("bhrw,bhrw->bhr", self.dout[:, :, rows], self.out[:, :, rows])
        if self.dlse is not None:
            delta -= self.dlse[:, :, rows]
        return delta

    def store(self, blocks: Blocks, heads: Heads, dq: Array, common: Array | None) -> None:
        """Write dQ to its place.

        The common part of the keys is multiplied by the sum of a row's dS. It
        is exactly dlse where the weights add up to 1; computed, it would have
        an error that a large common part makes larger than all the rest.
        """
        if common is not None and self.sums is not None and self.centred is not None:
            exact = np.zeros_like(self.sums) if self.dlse is None else self.dlse
            of_common = np.where(np.asarray(self.same), exact, self.sums)[..., None] * common
            np.add(self.dq, of_common, out=self.dq, where=self.centred[..., None, None])
        self.dq *= blocks.problem.scale
        if self.some_dead:
            self.dq[self.dead] = 0
        heads.set_rows(dq, self.dq)

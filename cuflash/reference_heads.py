"""Both passes, head by head, from their definition, for :mod:`cuflash.reference`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .reference_dropout import dropped
from .reference_scores import Places, cap_slopes, capped, distances, function_of, in_blocks

__all__ = ["Heads"]

_Array = NDArray[Any]


class Heads:
    """Attention, one (batch, head) at a time; arrays are (batch, head, row, dim)."""

    def __init__(
        self,
        q: _Array,
        k: _Array,
        v: _Array,
        alibi_slopes: _Array | None,
        bias: _Array | None,
        mask: _Array | None,
        block_mask: Any,
        sinks: _Array | None,
        lengths: Mapping[str, _Array | None],
        dropout_p: float | None,
        dropout_seed: Any,
        causal: bool,
        window_size: tuple[int | None, int | None] | None,
        softcap: float | None,
        function: Any,
        scale: float | None,
        q_offset: int | None,
        dtype: type[np.floating[Any]],
    ) -> None:
        self._q, self._k, self._v, self._dtype = q, k, v, dtype
        of_heads = np.full(q.shape[1], -math.inf) if sinks is None else sinks
        self._sinks: _Array = of_heads.astype(dtype)
        slopes = np.zeros(q.shape[1]) if alibi_slopes is None else alibi_slopes
        self._alibi: _Array = np.broadcast_to(slopes.astype(dtype), q.shape[:2])
        square = (*q.shape[:2], q.shape[2], k.shape[2])
        self._places = Places(lengths, square, causal, window_size, q_offset)
        i, j = self._places.i, self._places.j
        self._has_slopes = alibi_slopes is not None
        self._bias: _Array = np.broadcast_to(0 if bias is None else bias, square)
        self._mask: _Array = np.broadcast_to(True if mask is None else mask, square)
        if block_mask is not None:
            self._mask = self._mask & in_blocks(block_mask.blocks, block_mask.block, i, j)
        self._scale = dtype(1) / np.sqrt(dtype(q.shape[3])) if scale is None else dtype(scale)
        self._cap = dtype(softcap or 0)
        self._dropout = dropout_p, dropout_seed
        self._function = function_of(function, (i, j, self._places.offsets))

    def kv_head(self, h: int) -> int:
        """The kv head that query head h reads."""
        return h // int(self._q.shape[1] // self._k.shape[1])

    def forward(self, b: int, h: int) -> tuple[_Array, _Array]:
        """Out and lse of one head."""
        with np.errstate(invalid="ignore", over="ignore"):
            p, lse, seen = self._softmax(b, h)
            p = _left_of(p, self._dropped(b, h))
            return _sum_of_seen(p, seen, self._head(self._v, b, self.kv_head(h))), lse

    def backward(
        self, b: int, h: int, dout: _Array, dlse: _Array
    ) -> tuple[_Array, _Array, _Array, _Array, _Array]:
        """A query head's parts of dq, dk, dv and dbias, and the gradients of its slope and sink.

        The part of dbias is dZ, (seqlen_q, seqlen_kv).
        """
        q = self._head(self._q, b, h)
        k, v = (self._head(x, b, self.kv_head(h)) for x in (self._k, self._v))
        dout, dlse = dout.astype(self._dtype), dlse.astype(self._dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            p, lse, seen = self._softmax(b, h)
            left = self._dropped(b, h)
            weights = _left_of(p, left)
            out = _sum_of_seen(weights, seen, v)
            delta = np.where(seen.any(axis=1), (dout * out).sum(axis=1), 0)
            dp = np.where(left == 0, 0, dout @ v.T * left)
            dz = p * (dp - delta[:, None] + dlse[:, None])
            ds = dz * self._slopes(self._scale * (q @ k.T), b, h)
            dq = self._scale * _sum_of_seen(ds, seen, k)
            dk = self._scale * _sum_of_seen(ds.T, seen.T, q)
            dv = _sum_of_seen(weights.T, seen.T, dout)
            sinks = self._sinks_of_rows(b, h)
            of_sink = np.where(sinks == -math.inf, 0, np.exp(sinks - lse) * (dlse - delta))
            of_slope = -np.where(seen, self._distances(b) * dz, 0)
            numbers = np.array([of_slope.sum(), np.sum(of_sink, dtype=self._dtype)])
            return dq, dk, dv, np.where(seen, dz, 0), numbers

    def _head(self, x: _Array, b: int, h: int) -> _Array:
        head: _Array = x[b, h].astype(self._dtype)
        return head

    def _distances(self, b: int) -> _Array:
        """Distances from every query of an entry to every key; 0 without slopes."""
        if not self._has_slopes:
            return np.zeros((1, 1), self._dtype)
        at = self._places
        return distances(at.i, at.j, int(at.offsets[b])).astype(self._dtype)

    def _sinks_of_rows(self, b: int, h: int) -> _Array:
        """The sink of every query of a head, (seqlen_q,); minus infinity if it does not count."""
        counts = self._places.i[:, 0] < self._places.queries[b]
        sinks: _Array = np.where(counts, self._sinks[h], -math.inf)
        return sinks.astype(self._dtype)

    def _changed(self, scores: _Array, b: int, h: int) -> _Array:
        """The scores after the cap or the function."""
        if self._function is None:
            return capped(scores, self._cap)
        return self._function.of(scores, b, h)

    def _slopes(self, scores: _Array, b: int, h: int) -> _Array:
        """The derivatives of the changed scores by the scores."""
        if self._function is None:
            return cap_slopes(scores, self._cap)
        return self._function.slopes(scores, b, h)

    def _dropped(self, b: int, h: int) -> _Array:
        """The factors of a head's weights under dropout, (seqlen_q, seqlen_kv)."""
        p, seed = self._dropout
        rows, keys, heads = self._q.shape[2], self._k.shape[2], self._q.shape[1]
        if not p:
            return np.ones((rows, keys), self._dtype)
        return dropped(p, seed, b * heads + h, rows, keys, self._dtype)

    def _softmax(self, b: int, h: int) -> tuple[_Array, _Array, _Array]:
        """P, lse, and the pairs that count: visible pairs of rows that are not dead.

        Their shapes are (seqlen_q, seqlen_kv), (seqlen_q,) and (seqlen_q, seqlen_kv).
        """
        q, k = self._head(self._q, b, h), self._head(self._k, b, self.kv_head(h))
        sinks = self._sinks_of_rows(b, h)
        scores = self._changed(self._scale * (q @ k.T), b, h)
        scores -= self._alibi[b, h] * self._distances(b)
        scores += self._bias[b, h].astype(self._dtype)
        visible = self._places.visible(b) & self._mask[b, h]
        scores = np.where(visible, scores, -math.inf)
        of_keys = scores.max(axis=1, initial=-math.inf)
        largest = np.maximum(of_keys, sinks)
        nothing = largest == -math.inf
        base = np.where(nothing, 0, largest)
        weights = np.exp(scores - base[:, None])
        total = np.where(nothing, 1, weights.sum(axis=1) + np.exp(sinks - base))
        lse = np.where(nothing, -math.inf, largest + np.log(total))
        alive = (of_keys != -math.inf) | (sinks != -math.inf)
        return weights / total[:, None], lse, visible & alive[:, None]


def _left_of(p: _Array, left: _Array) -> _Array:
    """The weights with 0 for the dropped ones, whatever those are."""
    return np.where(left == 0, 0, p * left)


def _sum_of_seen(weights: _Array, seen: _Array, values: _Array) -> _Array:
    """Row i: ``sum_j weights[i, j] * values[j]`` over the j with ``seen[i, j]``.

    Pairs that are not seen are left out of the sum; multiplying them by 0 would let their NaN
    through.
    """
    finite = np.isfinite(values)
    total = np.where(seen, weights, 0) @ np.where(finite, values, 0)
    for j in np.flatnonzero(~finite.all(axis=1)):
        term = weights[:, j, None] * np.where(finite[j], 0, values[j])
        total += np.where(seen[:, j, None], term, 0)
    return total

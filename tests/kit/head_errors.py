"""Squares of the rounding errors of one head's results; see ``error_model``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .case import OF_FEATURES, Case
from .dropped import left_of
from .limits import MOST_WEIGHT, SMALLEST, SUM_DRIFT, TANH, UNIT

__all__ = ["ErrorsOfHead", "alike_terms"]


def alike_terms(case: Case) -> dict[str, int]:
    """The number of equal terms in a sum; 0 unless all terms are equal."""
    rows = case.seqlen_q * case.group if case.values == "equal" else 0
    keys = case.seqlen_kv if case.values in ("equal", "zeros") else 0
    return {"out": keys, "lse": keys, "dq": keys, "dk": rows, "dv": rows}


class ErrorsOfHead:
    """Squares of E of one query head."""

    def __init__(
        self,
        case: Case,
        inputs: Mapping[str, np.ndarray],
        results: Mapping[str, np.ndarray],
        b: int,
        h: int,
    ) -> None:
        self._x = _counted(case, inputs, b, h)
        self._sink = float(inputs["sinks"][h]) if "sinks" in inputs else -np.inf
        self._case = case
        self._out, lse = (results[name][b, h].astype(np.float64) for name in ("out", "lse"))
        live = lse != -np.inf
        self._lse = np.where(live, lse, 0)[:, None]
        whole = (case.batch, case.heads_q, case.seqlen_q, case.seqlen_kv)
        bias = np.broadcast_to(inputs.get("bias", 0), whole)[b, h].astype(np.float64)
        mask = np.broadcast_to(inputs.get("mask", True), whole)[b, h]
        self._seen = case.sees(b) & live[:, None] & (bias != -np.inf) & mask
        bias = np.where(self._seen, bias, 0)
        scores, self._slope = self._capped(case.factor * (self._x["q"] @ self._x["k"].T))
        self._distances = np.where(self._seen, case.distances(b), 0) if case.alibi else 0
        self._kept = left_of(case, inputs, b, h)  # the factors of the weights
        slopes = np.broadcast_to(inputs.get("alibi_slopes", 0), (case.batch, case.heads_q))
        lost = float(slopes[b, h]) * self._distances - bias
        logits = np.where(self._seen, scores - lost, -np.inf)
        self._p = np.exp(logits - self._lse)
        self._below = _below(self._sink, logits)
        terms = case.factor * (np.abs(self._x["q"]) @ np.abs(self._x["k"]).T)
        self._c = UNIT[case.statistics.name] / UNIT[case.dtype]
        self._of_slope: Any = 0.0  # error of the slope
        self._s = np.where(self._seen, self._c * terms * self._slope, 0)
        self._tanh = self._slope_by_tanh = np.zeros_like(self._s)
        if case.softcap:
            self._set_errors_of_cap(np.where(self._seen, np.abs(scores), 0), case.softcap)
        self._s += self._c * (np.abs(lost + bias) + np.abs(bias))

    def _set_errors_of_cap(self, size: np.ndarray, softcap: float) -> None:
        """Set the errors of tanh and of its slope; ``size`` is the magnitude of the capped
        scores."""
        by_score = 2 * (size / softcap) / softcap  # of the slope
        by_tanh = TANH[self._case.dtype] / UNIT[self._case.dtype]
        narrow = self._case.storage.itemsize == 2  # the slope is 1 - tanh^2
        rounded = self._c if narrow else 4 * by_tanh * self._slope
        self._of_slope = rounded + by_score * self._s
        self._tanh = size * by_tanh
        if narrow:
            self._slope_by_tanh = by_score * self._tanh

    def _capped(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Scores after the soft cap, and their slopes."""
        cap = self._case.softcap
        if not cap:
            return scores, np.ones_like(scores)
        return cap * np.tanh(scores / cap), 1 / np.cosh(np.clip(scores / cap, -300, 300)) ** 2

    def lse(self) -> np.ndarray:
        """The error of the log-sum-exp, (seqlen_q,)."""
        return ((self._p * self._s) ** 2).sum(axis=1) + (self._p * self._tanh).sum(axis=1) ** 2

    def out(self) -> np.ndarray:
        """The error of the output, (seqlen_q,)."""
        v, out = self._x["v"], self._out
        distance = _squares(v) * self._kept**2 - 2 * (out @ v.T) * self._kept
        distance += _squares(out)[:, None]
        distance = np.maximum(distance, 0)
        by_scores = ((self._p * self._s) ** 2 * distance).sum(axis=1)
        by_scores += (self._p * self._tanh * np.sqrt(distance)).sum(axis=1) ** 2
        square = (self._rounded(self._p) * self._kept**2) @ _squares(v) + by_scores
        return square + _squares(self._left()) + (self._c * self._below) ** 2 * _squares(out)

    def _left(self) -> np.ndarray:
        """E of the output from the factor by which a sink reduces all weights of a row."""
        most = MOST_WEIGHT[self._case.dtype] * SMALLEST[self._case.statistics.name]
        lost = self._c * most if self._sink > -np.inf else 0
        return (np.where(self._seen, lost, 0) * self._kept) @ np.abs(self._x["v"])

    def gradients(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The errors of dq, (seqlen_q,), dk and dv, (seqlen_kv,)."""
        x, p, factor, c = self._x, self._p, self._case.factor, self._c
        delta, delta_error, dp = self._delta()
        without = p * (dp - delta[:, None])
        ds = without * self._slope
        of_slope = self._of_slope + self._slope_by_tanh
        sloped = p * (self._slope + UNIT[self._case.dtype] * of_slope)
        relative = 1 + (self._s + c * np.abs(self._lse)) ** 2
        off = np.abs(x["dout"]) @ np.abs(x["v"]).T * self._kept
        flushed = np.where(self._seen, c * SMALLEST[self._case.statistics.name], 0)
        ds_error = self._rounded(ds) * relative + (c * sloped * off) ** 2
        ds_error += (flushed * (dp - delta[:, None])) ** 2 + (without * self._of_slope) ** 2
        dq = ds_error @ _squares(x["k"]) + delta_error * _squares(sloped @ x["k"])
        dk = (ds_error + sloped**2 * delta_error[:, None]).T @ _squares(x["q"])
        dv = (self._rounded(p) * self._kept**2 * relative).T @ _squares(x["dout"])
        of_weights = self._tanh + (p * self._tanh).sum(axis=1, keepdims=True)  # and of lse
        alike = np.abs(ds) * of_weights + np.abs(without) * self._slope_by_tanh
        dq += (alike @ np.sqrt(_squares(x["k"]))) ** 2
        dk += (alike.T @ np.sqrt(_squares(x["q"]))) ** 2
        dv += ((p * self._kept * of_weights).T @ np.sqrt(_squares(x["dout"]))) ** 2
        return factor**2 * dq, factor**2 * dk, dv

    def sink(self) -> tuple[float, float]:
        """The error of the gradient of the head's sink; and E, not squared, of the sum over its
        rows."""
        growth = self._growth()
        delta, delta_error, _ = self._delta(growth)
        lse = self._lse[:, 0]
        weight = np.exp(self._sink - lse) if self._sink > -np.inf else np.zeros_like(lse)
        exponent = np.abs(self._sink - lse) if self._sink > -np.inf else 0
        relative = self._c**2 * (1 + np.abs(lse) + 2 * exponent) ** 2 + growth**2 * self.lse()
        flushed = self._c * SMALLEST[self._case.statistics.name] if self._sink > -np.inf else 0
        square = weight**2 * (delta_error + delta**2 * relative) + (flushed * delta) ** 2
        long = np.abs(weight * delta).sum() * np.sqrt(max(1, self._case.batch * len(delta)))
        # The sink is rounded to the last digits of scores: equally in all rows, so without squares.
        long += (weight * self._below * np.abs((self._x["dout"] * self._out).sum(axis=1))).sum()
        return float(square.sum()), float(self._c * long)

    def alibi(self) -> tuple[float, float]:
        """The error of the slope's gradient; and E, not squared, of the sum over its pairs."""
        growth, p, c, away = self._growth(), self._p, self._c, self._distances
        delta, delta_error, dp = self._delta(growth)
        apart, lse = np.where(self._seen, dp - delta[:, None], 0), self._lse
        terms = away * p * apart
        off = np.abs(self._x["dout"]) @ np.abs(self._x["v"]).T * self._kept
        relative = (growth * self._s + c * (1 + np.abs(lse))) ** 2
        of_terms = terms**2 * relative + (growth * c * away * p * off) ** 2
        of_terms += (c * SMALLEST[self._case.statistics.name] * away * apart) ** 2
        if self._case.softcap and self._case.storage.itemsize == 2:
            of_terms += self._rounded(p) * (away * apart) ** 2
        of_weights = self._tanh + (p * self._tanh).sum(axis=1, keepdims=True)
        of_rows = (
            delta_error * (away * p).sum(axis=1) ** 2
            + (np.abs(terms) * of_weights).sum(axis=1) ** 2
        )
        of_rows += terms.sum(axis=1) ** 2 * (growth**2 * self.lse() + (c * lse[:, 0]) ** 2)
        square = of_terms.sum() + of_rows.sum()
        if self._case.values == "equal":
            square *= max(1, self._case.batch * terms.size)
        roots = np.sqrt(self._case.batch * len(terms)) + np.sqrt(self._case.seqlen_kv)
        return float(square), float(c * roots * np.abs(terms).sum())

    def bias(self) -> tuple[np.ndarray, np.ndarray]:
        """The error of the bias' gradient for every pair, (seqlen_q, seqlen_kv).

        Squares, to be added up, and E, not squared, of the sum over the broadcast axes.
        """
        growth, p, c = self._growth(), self._p, self._c
        delta, delta_error, dp = self._delta(growth)
        apart, lse = np.where(self._seen, dp - delta[:, None], 0), self._lse
        terms = p * apart
        off = np.abs(self._x["dout"]) @ np.abs(self._x["v"]).T * self._kept
        relative = (growth * self._s + c * (1 + np.abs(lse))) ** 2
        square = terms**2 * relative + (growth * c * p * off) ** 2
        square += (c * SMALLEST[self._case.statistics.name] * apart) ** 2
        if self._case.softcap and self._case.storage.itemsize == 2:
            square += self._rounded(p) * apart**2
        of_weights = self._tanh + (p * self._tanh).sum(axis=1, keepdims=True)
        of_weights = of_weights + growth * np.sqrt(self.lse())[:, None]  # of the log-sum-exp
        # The part that a row's pairs share: equal for one number, at most this much for a sum over
        # keys.
        keys = self._summed("seqlen_kv")
        if self._case.values == "equal":
            square *= keys
        of_row = np.sqrt(delta_error)[:, None] * p + np.abs(terms) * of_weights
        square += keys * of_row**2
        if self._case.values == "equal":  # all rows, heads and entries are the same
            square *= self._summed("batch") * self._summed("heads_q") * self._summed("seqlen_q")
        rows = self._case.batch * self._case.heads_q * self._case.seqlen_q
        roots = np.sqrt(rows) + np.sqrt(self._case.seqlen_kv)
        return np.where(self._seen, square, 0), c * roots * np.abs(terms)

    def _summed(self, axis: str) -> int:
        """The number of terms that the bias' gradient sums along an axis; 1 if it has the axis."""
        letters = {"batch": "b", "heads_q": "h", "seqlen_q": "q", "seqlen_kv": "k"}
        has = letters[axis] in self._case.bias_axes
        return 1 if has else max(1, getattr(self._case, axis))

    def _growth(self) -> float:
        """The growth of a score's error with head_dim, without a comparison with plain NumPy.

        The first term may be the whole sum. Each further addition errs by at most half a unit in
        its last place, by 0.58 u as a root mean square, and these errors are independent.
        """
        wide = self._case.storage.itemsize > 2
        return max(1.0, 0.6 * self._case.head_dim**0.5) if wide else 1.0

    def _delta(self, growth: float = 1.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Delta of every row less dlse, the square of its E, and dP."""
        x, p, c = self._x, self._p, self._c
        terms = x["dout"] * self._out
        delta = terms.sum(axis=1) - x.get("dlse", 0)
        dp = x["dout"] @ x["v"].T * self._kept
        ds = p * (dp - delta[:, None])
        smallest = SMALLEST[self._case.dtype]
        error = _squares(np.abs(x["dout"]) * np.maximum(np.abs(self._out), smallest))
        if self._case.dropout and self._case.values == "equal":  # out is one number, rounded alike
            error += np.abs(terms).sum(axis=1) ** 2
        error += (np.abs(x["dout"]) * self._left()).sum(axis=1) ** 2
        error += (np.abs(ds) * self._tanh).sum(axis=1) ** 2
        error += (self._rounded(p) * dp**2 + (growth * ds * self._s) ** 2).sum(axis=1)
        drift = 1 + SUM_DRIFT * alike_terms(self._case)["out"]  # of the out in delta
        error += (c * drift * np.abs(terms).sum(axis=1)) ** 2
        return delta, error, dp

    def _rounded(self, values: np.ndarray) -> np.ndarray:
        """Squares of the magnitudes to which roundings are relative, 0 where nothing is seen."""
        magnitude = np.maximum(np.abs(values), SMALLEST[self._case.dtype])
        return np.where(self._seen, magnitude, 0) ** 2


def _counted(case: Case, inputs: Mapping[str, np.ndarray], b: int, h: int) -> dict[str, np.ndarray]:
    """The rows of a head, with zeros in rows that do not count: these have no error."""
    heads = {"q": h, "dout": h, "dlse": h, "k": h // case.group, "v": h // case.group}
    queries, keys = case.counted(b)
    found = {
        name: case.heads_first(name, array)[b, heads[name]].astype(np.float64)
        for name, array in inputs.items()
        if name not in OF_FEATURES
    }
    for name, array in found.items():
        array[keys if name in ("k", "v") else queries :] = 0
    return found


def _below(sink: float, logits: np.ndarray) -> np.ndarray:
    """How far the largest logit of every row lies below the sink, or 0.

    The row is multiplied by exp(m - sink), m its largest logit. The difference is rounded and errs
    by u |m - sink|; the factor, and the whole row, err by that relative amount.
    """
    top = logits.max(axis=1, initial=-np.inf)
    if not sink > -np.inf:
        return np.zeros_like(top)
    return np.maximum(sink - np.where(top > -np.inf, top, sink), 0)


def _squares(rows: np.ndarray) -> np.ndarray:
    return (rows**2).sum(axis=1)

"""What a case should give, and how far off rounding alone may take it.

A backend rounds P before ``P v`` and ``P^T dO``, dS before ``dS k`` and
``dS^T q``, and the output before delta, each by up to u of its dtype. Scores,
dP and delta are dot products in the compute dtype, each off by about c u of
the sum of its terms' magnitudes, c the ratio of the two dtypes' u. For every
row of every result :class:`Truth` holds the root of the sum of squares E of
what these contribute, in units of u::

    s_ij   = scale sum_c |q_ic k_jc|        t_ij = sum_c |dO_ic v_jc|
    lse_i    E^2 = c^2 sum_j P_ij^2 s_ij^2
    out_i    E^2 = sum_j P_ij^2 (|v_j|^2 + c^2 s_ij^2 |v_j - out_i|^2)
    dv_j     E^2 = sum_i P_ij^2 r_ij |dO_i|^2,  r_ij = 1 + c^2 (s_ij + |lse_i|)^2
    dq_i     E^2 = scale^2 (sum_j D_ij |k_j|^2 + e_i |sum_j P_ij k_j|^2)
    dk_j     E^2 = scale^2 sum_i (D_ij + P_ij^2 e_i) |q_i|^2
             D_ij = dS_ij^2 r_ij + c^2 P_ij^2 t_ij^2 + f^2 (dP_ij - delta_i)^2
             e_i  = sum_c (dO_ic out_ic)^2 + sum_j (P_ij^2 dP_ij^2 + c^2 dS_ij^2 s_ij^2)
                    + c^2 (sum_c |dO_ic out_ic|)^2

e_i is the square of delta's error: the saved output that delta is made from
carries the rounding of P and the error of the scores as well as its own.
f is what is lost, in u, where P is flushed to zero in the compute dtype.
Magnitudes below ``SMALLEST`` count as that. Roundings are independent, so
squares add up; only where all rows are the same row ("equal") are they the
same error in each: n of them are n times as large, not sqrt(n) times, and a
sum of n terms drifts one way, by ``SUM_DRIFT`` u of the compute dtype for each.
What is not here, the growth of long sums, is below u for 16-bit dtypes;
float32 and float64 are therefore compared with plain NumPy in the same dtype,
which :func:`plain` computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash import reference

from .case import Case
from .limits import SMALLEST, SUM_DRIFT, UNIT

__all__ = ["Truth", "judge", "plain"]

#: NumPy computes x86's extended precision; elsewhere it may be float64 or software.
WIDE = np.finfo(np.longdouble).eps < np.finfo(np.float64).eps


@dataclass(frozen=True)
class Truth:
    """Exact results of a case; arrays are (batch, head, row, dim), rows (batch, head, row).

    Attributes
    ----------
    results : dict
        "out", "lse" and, where asked for, "dq", "dk" and "dv".
    model : dict
        E of every row of every result.
    plain : tuple of dict
        The results of plain NumPy, forwards and backwards; empty for 16-bit dtypes.
    """

    case: Case
    results: dict[str, np.ndarray]
    model: dict[str, np.ndarray]
    plain: tuple[dict[str, np.ndarray], ...] = ()


def judge(case: Case, inputs: Mapping[str, np.ndarray]) -> Truth:
    """The truth about a case.

    Parameters
    ----------
    case : Case
        float64 is judged in longdouble, so keep it small.
    inputs : mapping
        "q", "k", "v", for the gradients "dout", and "dlse" where there is one;
        in the case's layout.
    """
    wide: Any = np.longdouble if case.dtype == "float64" else np.float64
    if case.dtype == "float64" and not WIDE:
        raise RuntimeError("float64 cannot be judged here: longdouble is no wider")
    options = {**case.options, "dtype": wide}
    q, k, v = (inputs[name] for name in "qkv")
    out, lse = reference.attention(q, k, v, **options)
    results = {"out": out, "lse": lse}
    if "dout" in inputs:
        dlse = inputs.get("dlse")
        grads = reference.attention_backward(inputs["dout"], q, k, v, dlse=dlse, **options)
        results.update(zip(("dq", "dk", "dv"), grads, strict=True))
    results = {name: case.heads_first(name, array) for name, array in results.items()}
    steps = (1, -1) if case.storage.itemsize > 2 else ()
    comparators = tuple(plain(case, inputs, step) for step in steps)
    return Truth(case, results, _model(case, inputs, results), comparators)


def _model(
    case: Case, inputs: Mapping[str, np.ndarray], results: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    squares = {name: np.zeros(result.shape[:3]) for name, result in results.items()}
    with np.errstate(invalid="ignore", over="ignore"):
        for b, h in np.ndindex(case.batch, case.heads_q):
            kv = h // case.group
            head = _Head(case, inputs, results, b, h)
            squares["lse"][b, h], squares["out"][b, h] = head.lse(), head.out()
            if "dq" in squares:
                squares["dq"][b, h], dk, dv = head.gradients()
                squares["dk"][b, kv] += dk
                squares["dv"][b, kv] += dv
        terms, unit = _alike_terms(case), UNIT[case.statistics.name] / UNIT[case.dtype]
        model = {name: np.sqrt(square * max(1, terms[name])) for name, square in squares.items()}
        for name in model:
            drift = SUM_DRIFT * unit * terms[name]
            rows = results[name].astype(np.float64)
            size = np.abs(rows) if name == "lse" else np.sqrt((rows**2).sum(axis=-1))
            model[name] += np.where(model[name] > 0, drift * np.nan_to_num(size, posinf=0), 0)
        return model


def _alike_terms(case: Case) -> dict[str, int]:
    """How many terms of a sum are the same term; 0 unless all are."""
    same = case.values == "equal"
    rows, keys = (case.seqlen_q * case.group, case.seqlen_kv) if same else (0, 0)
    return {"out": keys, "lse": keys, "dq": keys, "dk": rows, "dv": rows}


class _Head:
    """Squares of E of one query head."""

    def __init__(
        self,
        case: Case,
        inputs: Mapping[str, np.ndarray],
        results: Mapping[str, np.ndarray],
        b: int,
        h: int,
    ) -> None:
        heads = {"q": h, "dout": h, "dlse": h, "k": h // case.group, "v": h // case.group}
        self._x = {
            name: case.heads_first(name, array)[b, heads[name]].astype(np.float64)
            for name, array in inputs.items()
        }
        self._case = case
        self._out, lse = (results[name][b, h].astype(np.float64) for name in ("out", "lse"))
        live = lse != -np.inf
        self._lse = np.where(live, lse, 0)[:, None]
        self._seen = case.sees() & live[:, None]
        scores = case.factor * (self._x["q"] @ self._x["k"].T)
        self._p = np.exp(np.where(self._seen, scores - self._lse, -np.inf))
        terms = case.factor * (np.abs(self._x["q"]) @ np.abs(self._x["k"]).T)
        self._c = UNIT[case.statistics.name] / UNIT[case.dtype]
        self._s = np.where(self._seen, self._c * terms, 0)

    def lse(self) -> np.ndarray:
        """Of the log-sum-exp, (seqlen_q,)."""
        return ((self._p * self._s) ** 2).sum(axis=1)

    def out(self) -> np.ndarray:
        """Of the output, (seqlen_q,)."""
        v, out = self._x["v"], self._out
        distance = _squares(v) - 2 * (out @ v.T) + _squares(out)[:, None]
        by_scores = (self._p * self._s) ** 2 * np.maximum(distance, 0)
        return self._rounded(self._p) @ _squares(v) + by_scores.sum(axis=1)

    def gradients(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of dq, (seqlen_q,), dk and dv, (seqlen_kv,)."""
        x, p, factor, c = self._x, self._p, self._case.factor, self._c
        terms = x["dout"] * self._out
        delta = terms.sum(axis=1) - x.get("dlse", 0)
        dp = x["dout"] @ x["v"].T
        ds = p * (dp - delta[:, None])
        relative = 1 + (self._s + c * np.abs(self._lse)) ** 2
        off = np.abs(x["dout"]) @ np.abs(x["v"]).T
        flushed = np.where(self._seen, c * SMALLEST[self._case.statistics.name], 0)
        ds_error = self._rounded(ds) * relative + (c * p * off) ** 2
        ds_error += (flushed * (dp - delta[:, None])) ** 2
        smallest = SMALLEST[self._case.dtype]
        delta_error = _squares(np.abs(x["dout"]) * np.maximum(np.abs(self._out), smallest))
        delta_error += (self._rounded(p) * dp**2 + (ds * self._s) ** 2).sum(axis=1)
        drift = 1 + SUM_DRIFT * _alike_terms(self._case)["out"]  # of the out that delta is made of
        delta_error += (c * drift * np.abs(terms).sum(axis=1)) ** 2
        dq = ds_error @ _squares(x["k"]) + delta_error * _squares(p @ x["k"])
        dk = (ds_error + p**2 * delta_error[:, None]).T @ _squares(x["q"])
        dv = (self._rounded(p) * relative).T @ _squares(x["dout"])
        return factor**2 * dq, factor**2 * dk, dv

    def _rounded(self, values: np.ndarray) -> np.ndarray:
        """Squares of what the rounding of values is proportional to, 0 where nothing is seen."""
        magnitude = np.maximum(np.abs(values), SMALLEST[self._case.dtype])
        return np.where(self._seen, magnitude, 0) ** 2


def _squares(rows: np.ndarray) -> np.ndarray:
    return (rows**2).sum(axis=1)


def plain(case: Case, inputs: Mapping[str, np.ndarray], step: int = 1) -> dict[str, np.ndarray]:
    """Attention as one would write it in NumPy, in the case's own dtype.

    With a step of -1 queries and keys are taken from the last to the first:
    what weighs most is then added early instead of late, and errs more.
    The backward pass starts from the output and the lse that the forward
    pass saved, as a backend's does, and computes the scores again, adding in
    the other direction: scores that err alike in both passes would cancel.
    """
    x = {name: case.heads_first(name, array) for name, array in inputs.items()}
    gradients = "dout" in inputs
    names = ("out", "lse", "dq", "dk", "dv") if gradients else ("out", "lse")
    shapes = {n: case.heads_first(n, np.empty(case.shape(n))).shape for n in names}
    results = {name: np.zeros(shape, case.storage) for name, shape in shapes.items()}
    visible = case.sees()[::step, ::step]
    scale = case.storage.type(case.factor)
    ordered = {name: array[:, :, ::step] for name, array in results.items()}
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(case.batch, case.heads_q):
            kv = h // case.group
            q, k, v = x["q"][b, h, ::step], x["k"][b, kv, ::step], x["v"][b, kv, ::step]
            scores = np.where(visible, scale * _product(q, k.T), -np.inf)
            out, lse = _plain_forward(scores, v)
            ordered["out"][b, h], ordered["lse"][b, h] = out, lse
            if not gradients:
                continue
            scores = scale * _product(q[:, ::-1], k[:, ::-1].T)
            p = np.where(visible, np.exp(scores - np.where(lse == -np.inf, 0, lse)[:, None]), 0)
            dout = x["dout"][b, h, ::step]
            delta = (dout * out).sum(axis=1) - (x["dlse"][b, h, ::step] if "dlse" in x else 0)
            ds = p * (_product(dout, v.T) - delta[:, None])
            ordered["dq"][b, h] = scale * _product(ds, k)
            ordered["dk"][b, kv] += scale * _product(ds.T, q)
            ordered["dv"][b, kv] += _product(p.T, dout)
    return results


def _plain_forward(scores: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    largest = scores.max(axis=1, initial=-np.inf)
    dead = largest == -np.inf
    weights = np.exp(scores - np.where(dead, 0, largest)[:, None])
    total = np.where(dead, 1, weights.sum(axis=1))
    return _product(weights / total[:, None], v), np.where(dead, -np.inf, largest + np.log(total))


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b, as a product of matrices even for one row.

    BLAS has another routine for a vector, which adds in more parts and errs
    less; it is not what a row among others gets.
    """
    return (np.concatenate([a, a]) @ b)[:1] if len(a) == 1 else a @ b

"""Attention as one would write it in NumPy, in the case's own dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .case import Case
from .dropped import left_of

__all__ = ["plain"]


def plain(case: Case, inputs: Mapping[str, np.ndarray], step: int = 1) -> dict[str, np.ndarray]:
    """Attention as one would write it in NumPy, in the case's own dtype.

    With a step of -1 queries, keys and columns are taken from the last to the first: the largest
    weights are then added early instead of late, and err more. The backward pass starts from the
    saved output and lse, as a backend's does, and recomputes the scores, adding in the other
    direction: equal errors in both passes would cancel.
    """
    x = {name: case.heads_first(name, array) for name, array in inputs.items()}
    gradients = "dout" in inputs
    names = ("out", "lse", *("dq", "dk", "dv", *["dbias"] * bool(case.bias)) * gradients)
    sinks = x.get("sinks", np.full(case.heads_q, -np.inf)).astype(case.storage)
    alibi = np.broadcast_to(x.get("alibi_slopes", 0), (case.batch, case.heads_q))
    square = (case.batch, case.heads_q, case.seqlen_q, case.seqlen_kv)
    whole = (np.broadcast_to(x.get(n, by), square) for n, by in (("bias", 0), ("mask", True)))
    bias, mask = (pairs[:, :, ::step, ::step] for pairs in whole)
    empty = {name: case.heads_first(name, np.empty(case.shape(name))) for name in names}
    results = {name: np.zeros(like.shape, case.storage) for name, like in empty.items()}
    scale = case.storage.type(case.factor)
    ordered = {name: array[:, :, ::step] for name, array in results.items() if name != "dbias"}
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(case.batch, case.heads_q):
            kv, visible = h // case.group, case.sees(b)[::step, ::step] & mask[b, h]
            q, k, v = x["q"][b, h, ::step], x["k"][b, kv, ::step], x["v"][b, kv, ::step]
            scores, _ = _capped(case, scale * _product(q[:, ::step], k[:, ::step].T))
            away = case.distances(b)[::step, ::step].astype(case.storage) if case.alibi else 0
            lost = alibi[b, h].astype(case.storage) * away - bias[b, h].astype(case.storage)
            scores = np.where(visible, scores - lost, -np.inf)
            left = left_of(case, inputs, b, h, case.storage.type)[::step, ::step]
            out, lse = _plain_forward(scores, v, sinks[h], left)
            ordered["out"][b, h], ordered["lse"][b, h] = out, lse
            if not gradients:
                continue
            scores, slopes = _capped(case, scale * _product(q[:, ::-step], k[:, ::-step].T))
            p = np.exp(scores - lost - np.where(lse == -np.inf, 0, lse)[:, None])
            p = np.where(visible, p, 0)
            dout = x["dout"][b, h, ::step]
            delta = (dout * out).sum(axis=1) - (x["dlse"][b, h, ::step] if "dlse" in x else 0)
            dz = p * (left * _product(dout, v.T) - delta[:, None])
            ds = dz * slopes
            _add_pairs(results.get("dbias"), b, h, dz[::step, ::step])
            ordered["dq"][b, h] = scale * _product(ds, k)
            ordered["dk"][b, kv] += scale * _product(ds.T, q)
            ordered["dv"][b, kv] += _product((left * p).T, dout)
    return results


def _add_pairs(total: np.ndarray | None, b: int, h: int, pairs: np.ndarray) -> None:
    """Add the pairs of a head to an array that broadcasts against all pairs, if it is there."""
    if total is None:
        return
    whole = total.reshape((1,) * (4 - total.ndim) + total.shape)
    place = whole[b % whole.shape[0], h % whole.shape[1]]
    for axis in (0, 1):
        if place.shape[axis] == 1:
            pairs = pairs.sum(axis=axis, keepdims=True)
    place += pairs


def _capped(case: Case, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray | int]:
    """Scores after the soft cap, and their slopes."""
    if not case.softcap:
        return scores, 1
    cap = case.storage.type(case.softcap)
    e = np.exp(-2 * np.abs(scores / cap))
    return cap * np.tanh(scores / cap), 4 * e / (1 + e) ** 2


def _plain_forward(
    scores: np.ndarray, v: np.ndarray, sink: np.floating[Any], left: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    largest = np.maximum(scores.max(axis=1, initial=-np.inf), sink)
    dead = largest == -np.inf
    base = np.where(dead, 0, largest)
    weights = np.exp(scores - base[:, None])
    total = np.where(dead, 1, weights.sum(axis=1) + np.exp(sink - base))
    return _product(weights / total[:, None] * left, v), np.where(
        dead, -np.inf, largest + np.log(total)
    )


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b, as a product of matrices even for one row.

    BLAS has another routine for a vector, which adds in more parts and errs less; a row among
    others does not get it.
    """
    return (np.concatenate([a, a]) @ b)[:1] if len(a) == 1 else a @ b

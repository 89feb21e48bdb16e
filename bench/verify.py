"""Holds timed outputs against float64 on the device, by the row-wise rule of the tests.

Of a long sequence a sample of rows is checked: the float64 work stays small
beside what is timed. The truth of a case is computed once, for all implementations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .cases import Case
from .inputs import Inputs, array_module, widened

__all__ = ["WRONG", "Truth"]

#: Largest relative error of one rounding to the storage type.
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
#: Below this magnitude a rounding errs by the unit of this. float16 has it where a test can see it.
SMALLEST = {"float16": 2.0**-14}
#: Longest sequence that is checked whole, and how many rows of a longer one are.
WHOLE, SAMPLE = 2048, 512
#: Rows of scores that are in memory at once.
CHUNK = 1024
#: A ratio that no order of roundings explains: something else was computed.
WRONG = 100.0


@dataclass(frozen=True)
class _Head:
    """What is right for the sampled rows of one head, and the roundings' part of the error."""

    batch: int
    tensors: list[tuple[int, Any, Any, Any]]  # head, rows, truth, model; for every output


class Truth:
    """What a case has to give, in the first and the last head."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self._case = case
        places = {(0, 0), (case.batch - 1, case.heads_q - 1)}
        self._heads = [_Head(b, _truth(case, inputs, b, h)) for b, h in sorted(places)]

    def worst_ratio(self, outputs: Sequence[Any]) -> float:
        """Most of ``|x - r| / (u (|r| + E))`` over the checked rows; infinite for NaN.

        E is what the roundings that really happen (of P, of dS and of the
        output) amount to; a correct kernel stays below 1 forward, 2 backward.
        """
        worst = 0.0
        for head in self._heads:
            for x, (of_head, rows, truth, model) in zip(outputs, head.tensors, strict=True):
                found = widened(x[head.batch, :, of_head])[rows]
                worst = max(worst, self._ratio(found, truth, model))
        return worst

    def _ratio(self, found: Any, truth: Any, model: Any) -> float:
        xp = array_module(found)
        error = xp.linalg.norm(found - truth, axis=-1)
        size = xp.maximum(abs(truth), SMALLEST.get(self._case.dtype, 0.0))
        allowed = UNIT[self._case.dtype] * (xp.linalg.norm(size, axis=-1) + model)
        ratio = xp.where(error == 0, 0, error / xp.maximum(allowed, 1e-300))
        worst = float(ratio.max())
        return worst if math.isfinite(worst) else math.inf


def _sample(length: int) -> Any:
    """Rows spread over a sequence, both ends among them; odd and even, of every tile width."""
    if length <= WHOLE:
        return np.arange(length)
    return np.unique(np.linspace(0, length - 1, SAMPLE).round().astype(np.int64))


_Tensors = tuple[Any, Any, Any, Any]  # q, k, v, dout


def _truth(case: Case, inputs: Inputs, batch: int, head: int) -> list[tuple[int, Any, Any, Any]]:
    """Of a query head, and where there are gradients of the keys that it shares with others."""
    group = case.heads_q // case.heads_kv
    of_keys = head // group

    def tensors(head: int) -> _Tensors:
        of = {"q": head, "k": of_keys, "v": of_keys, "dout": head}
        q, k, v, dout = (widened(getattr(inputs, name)[batch, :, h]) for name, h in of.items())
        return q, k, v, dout

    q, k, v, _ = tensors(head)
    xp, scale = array_module(q), case.head_dim**-0.5
    rows, columns = (xp.asarray(_sample(len(a))) for a in (q, k))
    if case.op == "forward":
        p = _weights(case, q, k, rows)
        return [(head, rows, p @ v, _product_model(xp, p * p, v))]
    sharing = range(of_keys * group, (of_keys + 1) * group)
    parts = [_of_keys(case, tensors(one), columns) for one in sharing]
    dk, dk_square, dv, dv_square = (sum(part) for part in zip(*parts, strict=True))
    return [
        (head, rows, *_dq(case, tensors(head), rows)),
        (of_keys, columns, dk * scale, scale * xp.sqrt(dk_square)),
        (of_keys, columns, dv, xp.sqrt(dv_square)),
    ]


def _product_model(xp: Any, square: Any, b: Any) -> Any:
    """Of a product whose left factor was rounded element by element: its squares are given."""
    return xp.sqrt(square @ (b * b).sum(-1))


def _weights(case: Case, q: Any, k: Any, rows: Any) -> Any:
    """Rows of P."""
    xp = array_module(q)
    scores = q[rows] @ k.T * case.head_dim**-0.5
    if case.causal:
        seen = xp.arange(len(k))[None] <= rows[:, None] + len(k) - len(q)
        scores = xp.where(seen, scores, -xp.inf)
    p = xp.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return p


def _of_keys(case: Case, tensors: _Tensors, columns: Any) -> tuple[Any, Any, Any, Any]:
    """dk / scale and dv of the columns, each with its error's square; by chunks of rows of P."""
    q, k, v, dout = tensors
    xp = array_module(q)
    dk = xp.zeros((len(columns), k.shape[-1]))
    dv = xp.zeros((len(columns), v.shape[-1]))
    dk_error, dv_error = (xp.zeros(len(columns)) for _ in range(2))
    for start in range(0, len(q), CHUNK):
        chunk = xp.arange(start, min(start + CHUNK, len(q)))
        p, ds, ds_square, rounding = _score_gradients(case, tensors, chunk)
        square = p[:, columns] ** 2
        dk += ds[:, columns].T @ q[chunk]
        dv += p[:, columns].T @ dout[chunk]
        dk_square = ds_square[:, columns] + square * rounding[:, None]
        dk_error += dk_square.T @ (q[chunk] ** 2).sum(-1)
        dv_error += square.T @ (dout[chunk] ** 2).sum(-1)
    return dk, dk_error, dv, dv_error


def _dq(case: Case, tensors: _Tensors, rows: Any) -> tuple[Any, Any]:
    k, scale = tensors[1], case.head_dim**-0.5
    xp = array_module(k)
    p, ds, ds_square, rounding = _score_gradients(case, tensors, rows)
    error = ds_square @ (k * k).sum(-1) + rounding * ((p @ k) ** 2).sum(-1)
    return ds @ k * scale, scale * xp.sqrt(error)


def _score_gradients(case: Case, tensors: _Tensors, rows: Any) -> tuple[Any, Any, Any, Any]:
    """Rows of P and dS, the squares that dS was rounded with, and what delta's rounding adds."""
    q, k, v, dout = tensors
    xp = array_module(q)
    p = _weights(case, q, k, rows)
    out, dp = p @ v, dout[rows] @ v.T
    ds = p * (dp - (dout[rows] * out).sum(-1, keepdims=True))
    rounded = xp.maximum(abs(ds), SMALLEST.get(case.dtype, 0.0))
    ds_square = xp.where(p > 0, rounded, 0) ** 2
    # Of the output inside delta: its own rounding, and that of the weights it was summed with.
    rounding = ((dout[rows] * out) ** 2).sum(-1) + (p * p * dp**2).sum(-1)
    return p, ds, ds_square, rounding

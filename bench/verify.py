"""Checks timed outputs against float64 on the device, by the row-wise rule of the tests.

Only a sample of the rows of a long sequence is checked, so that the float64 work stays small
compared with the timed work. The truth of a case is computed once for all implementations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .case import CAP
from .cases import Case
from .inputs import Inputs, array_module, widened
from .masks import BLOCK

__all__ = ["WRONG", "Truth"]

#: The largest relative error of one rounding to the storage type.
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
#: Smaller numbers have the rounding error of this one. In other types it is too small to matter.
SMALLEST = {"float16": 2.0**-14}
#: The longest sequence that is checked as a whole; the number of rows in a sample of a longer one.
WHOLE, SAMPLE = 2048, 512
#: Rows of scores in memory at once.
CHUNK = 1024
#: Roundings cannot explain a larger ratio: the result is wrong.
WRONG = 100.0
#: The same limit for cases in which a feature, or a few of many keys, change a row only a little.
WRONG_FEATURE = 10.0


@dataclass(frozen=True)
class _Head:
    """The true values of the sampled rows of one head, and the error that roundings explain."""

    batch: int
    tensors: list[tuple[int, Any, Any, Any]]  # head, rows, truth, model; for every output


@dataclass(frozen=True)
class _Part:
    """The checked section of a feature's gradient, which is summed over all batch entries."""

    place: Any  # the index of the section in the array
    rows: Any  # the checked rows of the section; None for all of them
    truth: Any
    model: Any


class Truth:
    """The expected results of a case, in the first and the last head."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self._case = case
        places = {(0, 0), (case.batch - 1, case.heads_q - 1)}
        self._heads = [_Head(b, _truth(case, inputs, b, h)) for b, h in sorted(places)]
        ends = (0, case.heads_q - 1)
        self._parts = [[_PARTS[n](case, inputs, h) for h in ends] for n in case.gradients]

    def worst_ratio(self, outputs: Sequence[Any]) -> float:
        """The largest ``|x - r| / (u (|r| + E))`` over the checked rows; infinite for NaN.

        E is the error that the roundings of P, of dS and of the output explain. A correct kernel
        stays below 1 in the forward and below 2 in the backward pass.
        """
        matrices, others = outputs[: self._matrices], outputs[self._matrices :]
        worst = 0.0
        for head in self._heads:
            for x, (of_head, rows, truth, model) in zip(matrices, head.tensors, strict=True):
                entry = x[head.batch] if x.ndim == 4 else x
                found = widened(entry[:, of_head])[rows]
                worst = max(worst, self._ratio(found, truth, model))
        for x, parts in zip(others, self._parts, strict=True):
            for one in parts:
                found = widened(x[one.place])
                found = found if one.rows is None else found[one.rows]
                worst = max(worst, self._ratio(found, one.truth, one.model))
        return worst

    @property
    def limit(self) -> float:
        """The ratio beyond which the result is wrong."""
        return WRONG_FEATURE if self._case.rotated or self._case.features else WRONG

    @property
    def _matrices(self) -> int:
        """The number of outputs for q, k and v; the gradients of other arrays come after them."""
        return len(self._heads[0].tensors)

    def _ratio(self, found: Any, truth: Any, model: Any) -> float:
        xp = array_module(found)
        error = xp.linalg.norm(found - truth, axis=-1)
        size = xp.maximum(abs(truth), SMALLEST.get(self._case.dtype, 0.0))
        allowed = UNIT[self._case.dtype] * (xp.linalg.norm(size, axis=-1) + model)
        ratio = xp.where(error == 0, 0, error / xp.maximum(allowed, 1e-300))
        worst = float(ratio.max())
        return worst if math.isfinite(worst) else math.inf


def _sample(length: int) -> Any:
    """Rows spread over a sequence, with both ends; odd and even rows of tiles of every width."""
    if length <= WHOLE:
        return np.arange(length)
    return np.unique(np.linspace(0, length - 1, SAMPLE).round().astype(np.int64))


@dataclass(frozen=True)
class _Tensors:
    """The tensors of one head, in float64."""

    q: Any
    k: Any
    v: Any
    dout: Any
    sink: Any  # one number; minus infinity is no sink
    slope: Any  # of ALiBi; 0 means none
    bias: Any  # (queries, keys), or None
    mask: Any  # (queries, keys), or None; False hides a pair
    sequences: Any  # the sequence number of every row, if they are packed


def _tensors(case: Case, inputs: Inputs, batch: int, head: int) -> _Tensors:
    of_keys = head // (case.heads_q // case.heads_kv)
    of = {"q": head, "k": of_keys, "v": of_keys, "dout": head}
    found = {name: widened(getattr(inputs, name)[batch, :, h]) for name, h in of.items()}
    sink = widened(inputs.sinks)[head] if case.sinks else -math.inf
    slope = widened(inputs.alibi_slopes)[head] if case.alibi else 0.0
    bias = widened(inputs.bias[0, head]) if case.bias else None
    mask = None if case.mask is None else _of_head(case, inputs.mask, batch, head)
    mask = _of_blocks(case, inputs.block_mask) if case.block_mask else mask
    own = {"sink": sink, "slope": slope, "bias": bias, "mask": mask}
    return _Tensors(**found, **own, sequences=_sequences(case, inputs) if case.lengths else None)


def _sequences(case: Case, inputs: Inputs) -> Any:
    """The sequence number of every row, which is the same for queries and for keys."""
    xp = array_module(inputs.q)
    return xp.searchsorted(inputs.cu_seqlens_q[1:], xp.arange(case.seqlen_q), side="right")


def _of_head(case: Case, mask: Any, batch: int, head: int) -> Any:
    """The mask of one head, from a mask with fewer entries, heads or queries, without a copy."""
    whole = (case.batch, case.heads_q, case.seqlen_q, case.seqlen_kv)
    return array_module(mask).broadcast_to(mask, whole)[batch, head]


def _of_blocks(case: Case, blocks: Any) -> Any:
    """The value of every pair from the values of blocks, which all heads share."""
    pairs = blocks[0, 0].repeat(BLOCK, axis=0).repeat(BLOCK, axis=1)
    return pairs[: case.seqlen_q, : case.seqlen_kv]


def _truth(case: Case, inputs: Inputs, batch: int, head: int) -> list[tuple[int, Any, Any, Any]]:
    """The truth of a query head and, in the backward pass, of the keys that its group shares."""
    group = case.heads_q // case.heads_kv
    of_keys = head // group

    x = _tensors(case, inputs, batch, head)
    xp, scale = array_module(x.q), case.head_dim**-0.5
    rows, columns = (xp.asarray(_sample(len(a))) for a in (x.q, x.k))
    if case.op == "forward":
        p = _weights(case, x, rows)
        return [(head, rows, p @ x.v, _product_model(xp, p * p, x.v))]
    sharing = range(of_keys * group, (of_keys + 1) * group)
    parts = [_of_keys(case, _tensors(case, inputs, batch, one), columns) for one in sharing]
    dk, dk_square, dv, dv_square = (sum(part) for part in zip(*parts, strict=True))
    return [
        (head, rows, *_dq(case, x, rows)),
        (of_keys, columns, dk * scale, scale * xp.sqrt(dk_square)),
        (of_keys, columns, dv, xp.sqrt(dv_square)),
    ]


def _product_model(xp: Any, square: Any, b: Any) -> Any:
    """The error model of a product whose left factor was rounded element by element."""
    return xp.sqrt(square @ (b * b).sum(-1))


def _scores(case: Case, x: _Tensors, rows: Any) -> tuple[Any, Any]:
    """Rows of the scores before the mask, and their derivatives by the scaled products."""
    xp, factors = array_module(x.q), 1.0
    scores = x.q[rows] @ x.k.T * case.head_dim**-0.5
    cap = CAP if case.score_mod else case.softcap
    if cap is not None:
        capped = xp.tanh(scores / cap)
        scores, factors = cap * capped, 1 - capped**2
    if case.alibi:
        scores = scores - x.slope * abs(rows[:, None] + case.offset - xp.arange(len(x.k)))
    if x.bias is not None:
        scores = scores + x.bias[rows]
    return scores, factors


def _weights(case: Case, x: _Tensors, rows: Any) -> Any:
    """Rows of P."""
    xp = array_module(x.q)
    scores, _ = _scores(case, x, rows)
    seen, keys = case.visibility, xp.arange(len(x.k))[None]
    if seen.first is not None:
        scores = xp.where(keys >= rows[:, None] + seen.first, scores, -xp.inf)
    if seen.last is not None:
        scores = xp.where(keys <= rows[:, None] + seen.last, scores, -xp.inf)
    if x.mask is not None:
        scores = xp.where(x.mask[rows], scores, -xp.inf)
    if x.sequences is not None:
        scores = xp.where(x.sequences[rows][:, None] == x.sequences, scores, -xp.inf)
    top = xp.maximum(scores.max(-1, keepdims=True), x.sink)
    top = xp.where(xp.isfinite(top), top, 0)  # for a row that sees nothing
    p = xp.exp(scores - top)
    total = p.sum(-1, keepdims=True) + xp.exp(x.sink - top)
    p /= xp.where(total > 0, total, 1)
    return p


def _of_keys(case: Case, x: _Tensors, columns: Any) -> tuple[Any, Any, Any, Any]:
    """dk / scale and dv of the columns, each with its squared error; sums over chunks of rows."""
    xp = array_module(x.q)
    dk = xp.zeros((len(columns), x.k.shape[-1]))
    dv = xp.zeros((len(columns), x.v.shape[-1]))
    dk_error, dv_error = (xp.zeros(len(columns)) for _ in range(2))
    for chunk in _chunks(x):
        p, ds, ds_square, rounding = _score_gradients(case, x, chunk)
        square = p[:, columns] ** 2
        dk += ds[:, columns].T @ x.q[chunk]
        dv += p[:, columns].T @ x.dout[chunk]
        dk_square = ds_square[:, columns] + square * rounding[:, None]
        dk_error += dk_square.T @ (x.q[chunk] ** 2).sum(-1)
        dv_error += square.T @ (x.dout[chunk] ** 2).sum(-1)
    return dk, dk_error, dv, dv_error


def _chunks(x: _Tensors) -> Iterator[Any]:
    """The queries, in chunks whose scores fit the memory."""
    xp = array_module(x.q)
    for start in range(0, len(x.q), CHUNK):
        yield xp.arange(start, min(start + CHUNK, len(x.q)))


def _dsink(case: Case, inputs: Inputs, head: int) -> _Part:
    """The gradient of a head's sink: minus the sum over all rows of its weight times delta."""
    total, square = 0.0, 0.0
    for batch in range(case.batch):
        x = _tensors(case, inputs, batch, head)
        for chunk in _chunks(x):
            p, _, delta, rounding = _term_gradients(case, x, chunk)
            weight = 1 - p.sum(-1)
            total = total - weight @ delta
            square = square + weight**2 @ rounding
    xp = array_module(inputs.q)
    return _Part(slice(head, head + 1), None, xp.asarray(total).reshape(1), xp.sqrt(square))


def _dbias(case: Case, inputs: Inputs, head: int) -> _Part:
    """Sampled rows of a head's bias gradient: dS summed over the batch."""
    xp = array_module(inputs.q)
    rows, total, square = xp.asarray(_sample(case.seqlen_q)), 0.0, 0.0
    for batch in range(case.batch):
        x = _tensors(case, inputs, batch, head)
        p, dz, _, rounding = _term_gradients(case, x, rows)
        total = total + dz
        square = square + (_rounded(case, p, dz) + p * p * rounding[:, None]).sum(-1)
    return _Part((0, head), rows, total, xp.sqrt(square))


_PARTS = {"bias": _dbias, "sinks": _dsink}


def _dq(case: Case, x: _Tensors, rows: Any) -> tuple[Any, Any]:
    xp, scale = array_module(x.q), case.head_dim**-0.5
    p, ds, ds_square, rounding = _score_gradients(case, x, rows)
    error = ds_square @ (x.k * x.k).sum(-1) + rounding * ((p @ x.k) ** 2).sum(-1)
    return ds @ x.k * scale, scale * xp.sqrt(error)


def _score_gradients(case: Case, x: _Tensors, rows: Any) -> tuple[Any, Any, Any, Any]:
    """Rows of P, dS of the products, the squares for the roundings of dS, delta's squared error."""
    p, dz, _, rounding = _term_gradients(case, x, rows)
    ds = dz * _scores(case, x, rows)[1]
    return p, ds, _rounded(case, p, ds), rounding


def _rounded(case: Case, p: Any, ds: Any) -> Any:
    """The squares of the numbers to which the rounding errors of dS are relative."""
    xp = array_module(ds)
    return xp.where(p > 0, xp.maximum(abs(ds), SMALLEST.get(case.dtype, 0.0)), 0) ** 2


def _term_gradients(case: Case, x: _Tensors, rows: Any) -> tuple[Any, Any, Any, Any]:
    """Rows of P, the gradient of a term that is added to scores, delta, and its squared error."""
    p, dout = _weights(case, x, rows), x.dout[rows]
    out, dp = p @ x.v, dout @ x.v.T
    delta = (dout * out).sum(-1)
    # The output inside delta is rounded itself, and so are the weights of which it is a sum.
    rounding = ((dout * out) ** 2).sum(-1) + (p * p * dp**2).sum(-1)
    return p, p * (dp - delta[:, None]), delta, rounding

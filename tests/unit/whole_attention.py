"""Attention of the benchmarks' cases by whole matrices in float64, with their features."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.cases import Case
from bench.inputs import Inputs, narrowed, widened

__all__ = ["whole_attention"]


def whole_attention(case: Case, inputs: Inputs) -> list[Any]:
    """The output, or for a backward case the gradients: of q, k, v, and of bias and sinks."""
    group = case.heads_q // case.heads_kv
    q, k, v, dout = (widened(a) for a in (inputs.q, inputs.k, inputs.v, inputs.dout))
    k, v = (np.repeat(a, group, axis=2) for a in (k, v))
    scores = np.einsum("bihd,bjhd->bhij", q, k) * case.head_dim**-0.5
    slopes = 1.0
    if case.softcap:
        slopes = 1 / np.cosh(scores / case.softcap) ** 2
        scores = case.softcap * np.tanh(scores / case.softcap)
    if case.alibi:
        distance = np.abs(_position(case) - np.arange(case.seqlen_kv))
        scores -= widened(inputs.alibi_slopes)[:, None, None] * distance
    if case.bias:
        scores += widened(inputs.bias)
    scores[:, :, ~_visible(case)] = -np.inf
    p = np.exp(scores)
    sink = np.exp(widened(inputs.sinks))[None, :, None, None] if case.sinks else 0.0
    total = p.sum(-1, keepdims=True) + sink
    p = np.divide(p, total, out=np.zeros_like(p), where=total > 0)
    out = np.einsum("bhij,bjhd->bihd", p, v)
    if case.op == "forward":
        return [narrowed(out.astype(_wide(case)), case.dtype)]
    delta = np.einsum("bihd,bihd->bhi", dout, out)
    dbias = p * (np.einsum("bihd,bjhd->bhij", dout, v) - delta[..., None])
    ds = dbias * case.head_dim**-0.5 * slopes
    dk, dv = np.einsum("bhij,bihd->bjhd", ds, q), np.einsum("bhij,bihd->bjhd", p, dout)
    of_keys = [a.reshape(*a.shape[:2], case.heads_kv, group, -1).sum(3) for a in (dk, dv)]
    gradients = [np.einsum("bhij,bjhd->bihd", ds, k), *of_keys]
    if case.dbias:
        gradients.append(dbias.sum(0, keepdims=True))
    if case.sinks:
        gradients.append(-(sink / total * delta[..., None]).sum((0, 2, 3)))
    return [narrowed(a.astype(_wide(case)), case.dtype) for a in gradients]


def _position(case: Case) -> Any:
    """The position of every query among the keys, as a column."""
    return np.arange(case.seqlen_q)[:, None] + case.seqlen_kv - case.seqlen_q


def _visible(case: Case) -> Any:
    """Which query (first axis) sees which key (second axis), by the contract."""
    position = _position(case)
    left, right = case.window_size or (None, None)
    keys = np.arange(case.seqlen_kv)[None]
    seen = np.ones((case.seqlen_q, case.seqlen_kv), bool)
    if left is not None:
        seen &= keys >= position - left
    if right is not None:
        seen &= keys <= position + right
    return seen & (keys <= position) if case.causal else seen


def _wide(case: Case) -> type:
    return np.float64 if case.dtype == "float64" else np.float32

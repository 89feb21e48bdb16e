"""Attention by hand in CuPy, forward and backward: whole matrices, one operation after another.

It is what a user without a fused kernel writes, in the 16-bit type of the inputs and in place where
that is natural. The backward pass keeps P of the forward pass, as automatic differentiation does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..cases import Case
from ..inputs import Inputs, array_module

__all__ = ["backward", "bias_of", "forward", "needed_bytes", "prepare", "too_large"]


def bias_of(case: Case, xp: Any, dtype: Any) -> Any:
    """0 where a query sees a key and minus infinity elsewhere; None without a mask."""
    if not case.causal:
        return None
    rows = xp.arange(case.seqlen_q)[:, None] + case.seqlen_kv - case.seqlen_q
    hidden = xp.arange(case.seqlen_kv)[None] > rows
    return xp.where(hidden, dtype.type(-xp.inf), dtype.type(0))


def forward(q: Any, k: Any, v: Any, scale: Any, bias: Any) -> tuple[Any, Any]:
    """Output and P of (heads, seqlen, head_dim) arrays."""
    xp = array_module(q)
    scores = xp.matmul(q, k.swapaxes(-1, -2))
    scores *= scale
    if bias is not None:
        scores += bias
    scores -= scores.max(-1, keepdims=True)
    xp.exp(scores, out=scores)
    scores /= scores.sum(-1, keepdims=True)
    return xp.matmul(scores, v), scores


def backward(
    tensors: tuple[Any, Any, Any], kept: tuple[Any, Any], dout: Any, scale: Any
) -> tuple[Any, Any, Any]:
    """Gradients of q, k and v; ``kept`` is the output and P."""
    q, k, v = tensors
    out, p = kept
    xp = array_module(q)
    dv = xp.matmul(p.swapaxes(-1, -2), dout)
    ds = xp.matmul(dout, v.swapaxes(-1, -2))
    ds -= (dout * out).sum(-1, keepdims=True)
    ds *= p
    ds *= scale
    return xp.matmul(ds, k), xp.matmul(ds.swapaxes(-1, -2), q), dv


def needed_bytes(case: Case) -> int:
    """Bytes of the seqlen_q x seqlen_kv matrices.

    They are P, the mask, and in the backward pass dS and a transposed copy.
    """
    squares = case.batch * case.heads_q * (3 if case.op == "backward" else 1)
    return case.seqlen_q * case.seqlen_kv * 2 * (squares + (3 if case.causal else 0))


def too_large(needed: int, free: int) -> str:
    """The reason for leaving out matrices that do not fit."""
    return f"whole matrices need {needed / 1e9:.0f} GB, but {free / 1e9:.0f} GB are free"


def prepare(case: Case, inputs: Inputs) -> Callable[[], Any]:
    """The timed call: the output, or the gradients, (batch, seqlen, heads, head_dim)."""
    xp = array_module(inputs.q)

    def flat(array: Any) -> Any:
        """(batch * heads, seqlen, head_dim), contiguous."""
        swapped = xp.ascontiguousarray(array.swapaxes(1, 2))
        return swapped.reshape(-1, *swapped.shape[2:])

    def back(array: Any) -> Any:
        return array.reshape(case.batch, -1, *array.shape[1:]).swapaxes(1, 2)

    q, k, v = (flat(array) for array in (inputs.q, inputs.k, inputs.v))
    scale = q.dtype.type(case.head_dim**-0.5)
    bias = bias_of(case, xp, q.dtype)
    if case.op == "forward":
        return lambda: back(forward(q, k, v, scale, bias)[0])
    kept, dout = forward(q, k, v, scale, bias), flat(inputs.dout)
    return lambda: tuple(back(grad) for grad in backward((q, k, v), kept, dout, scale))

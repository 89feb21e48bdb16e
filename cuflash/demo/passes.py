"""Attention for the network: by cuflash, by array operations, or by the float64 reference."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from .. import reference
from ..api import attention, attention_backward

__all__ = ["Attention", "AttentionByHand", "CuflashAttention", "ReferenceAttention"]


class Attention(Protocol):
    """Causal self-attention over (batch, seqlen, heads, head_dim)."""

    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Return the output, and the arrays that :meth:`backward` needs."""

    def backward(self, dout: Any, saved: Any) -> Any:
        """Return the gradients of q, k and v side by side: (batch, seqlen, 3, heads, head_dim)."""


class CuflashAttention:
    """:func:`cuflash.attention` and its gradient, with q, k and v cast to a given dtype.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``cupy``.
    dtype : dtype
        The dtype that q, k and v are cast to.
    backend, algorithm, window_size
        As for :func:`cuflash.attention`.
    """

    def __init__(
        self,
        xp: Any,
        dtype: Any,
        backend: Any = "auto",
        algorithm: Any = "auto",
        window_size: tuple[int, int] | None = None,
    ) -> None:
        self._xp, self._dtype = xp, np.dtype(dtype)
        self._options: dict[str, Any] = {
            "causal": True,
            "window_size": window_size,
            "backend": backend,
            "algorithm": algorithm,
        }

    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Return the output in q's dtype, and the arrays that :meth:`backward` needs."""
        inputs = [x.astype(self._dtype, copy=False) for x in (q, k, v)]
        out, lse = attention(*inputs, return_lse=True, **self._options)
        return out.astype(q.dtype, copy=False), (*inputs, out, lse)

    def backward(self, dout: Any, saved: Any) -> Any:
        """Return the gradients of q, k and v in dout's dtype, side by side."""
        q, _, _, out, _ = saved
        batch, seqlen, heads, head_dim = q.shape
        # The loss is a mean over all bytes, so its gradient shrinks with their
        # number, below the range of float16. The scaled gradient stays in range.
        tokens = batch * seqlen
        narrow = out.dtype != dout.dtype
        scaled = (dout * tokens).astype(out.dtype) if narrow else dout
        grads = self._xp.empty((batch, seqlen, 3, heads, head_dim), q.dtype)
        parts = tuple(grads[:, :, i] for i in range(3))
        attention_backward(scaled, *saved, grads=parts, **self._options)
        return grads.astype(dout.dtype) / tokens if narrow else grads


class AttentionByHand:
    """Attention by plain array operations, which hold the whole matrix of weights in memory.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``cupy``.
    dtype : dtype
        Dtype of the products; the softmax is float32. For bfloat16, which neither
        module multiplies, the products are float32 too.
    """

    def __init__(self, xp: Any, dtype: Any) -> None:
        self._xp = xp
        self._dtype = np.dtype("float32" if dtype == "bfloat16" else dtype)

    def _heads_first(self, x: Any) -> Any:
        return x.transpose(0, 2, 1, 3).astype(self._dtype)

    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Return the output in float32, and the arrays that :meth:`backward` needs."""
        xp = self._xp
        inputs = q, k, v = [self._heads_first(x) for x in (q, k, v)]
        scale = q.shape[-1] ** -0.5
        scores = xp.matmul(q, k.swapaxes(2, 3)).astype(np.float32) * scale
        scores += xp.triu(xp.full(scores.shape[2:], -np.inf, np.float32), 1)
        scores -= scores.max(axis=-1, keepdims=True)
        weights = xp.exp(scores, out=scores)
        weights /= weights.sum(axis=-1, keepdims=True)
        out = xp.matmul(weights.astype(self._dtype), v)
        return out.transpose(0, 2, 1, 3).astype(np.float32), (*inputs, weights, scale)

    def backward(self, dout: Any, saved: Any) -> Any:
        """Return the gradients of q, k and v in float32, side by side."""
        xp = self._xp
        q, k, v, weights, scale = saved
        tokens = dout.shape[0] * dout.shape[1]  # as in CuflashAttention
        dout = self._heads_first(dout * tokens)
        dv = xp.matmul(weights.astype(self._dtype).swapaxes(2, 3), dout)
        dp = xp.matmul(dout, v.swapaxes(2, 3)).astype(np.float32)
        dp -= (dp * weights).sum(axis=-1, keepdims=True)
        ds = (weights * dp * scale).astype(self._dtype)
        grads = xp.matmul(ds, k), xp.matmul(ds.swapaxes(2, 3), q), dv
        side_by_side = xp.stack([x.transpose(0, 2, 1, 3) for x in grads], axis=2)
        return side_by_side.astype(np.float32) / tokens


class ReferenceAttention:
    """Attention from its definition (:mod:`cuflash.reference`), in float64 on the host."""

    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Return the output, and the inputs."""
        return reference.attention(q, k, v, causal=True)[0], (q, k, v)

    def backward(self, dout: Any, saved: Any) -> Any:
        """Return the gradients of q, k and v, side by side."""
        return np.stack(reference.attention_backward(dout, *saved, causal=True), axis=2)

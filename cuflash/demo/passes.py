"""The attention of the network: cuflash's, or the float64 reference in its place."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from .. import reference
from ..api import attention, attention_backward

__all__ = ["Attention", "CuflashAttention", "ReferenceAttention"]


class Attention(Protocol):
    """Causal self-attention over (batch, seqlen, heads, head_dim)."""

    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """The output, and what the gradient needs of it."""

    def backward(self, dout: Any, saved: Any) -> Any:
        """The gradients of q, k and v side by side: (batch, seqlen, 3, heads, head_dim)."""


class CuflashAttention:
    """:func:`cuflash.attention` and its gradient, in a storage type of its own.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``cupy``.
    dtype : dtype
        What q, k and v are cast to.
    backend, algorithm
        As for :func:`cuflash.attention`.
    """

    def __init__(self, xp: Any, dtype: Any, backend: Any = "auto", algorithm: Any = "auto") -> None:
        self._xp, self._dtype = xp, np.dtype(dtype)
        self._options: dict[str, Any] = {
            "causal": True,
            "backend": backend,
            "algorithm": algorithm,
        }

    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """The output in q's dtype, and what the gradient needs."""
        inputs = [x.astype(self._dtype, copy=False) for x in (q, k, v)]
        out, lse = attention(*inputs, return_lse=True, **self._options)
        return out.astype(q.dtype, copy=False), (*inputs, out, lse)

    def backward(self, dout: Any, saved: Any) -> Any:
        """The gradients of q, k and v in dout's dtype, written side by side."""
        q, _, _, out, _ = saved
        batch, seqlen, heads, head_dim = q.shape
        # The loss is a mean over all bytes, so its gradient shrinks with their
        # number, below what float16 can hold.
        tokens = batch * seqlen
        narrow = out.dtype != dout.dtype
        scaled = (dout * tokens).astype(out.dtype) if narrow else dout
        grads = self._xp.empty((batch, seqlen, 3, heads, head_dim), q.dtype)
        parts = tuple(grads[:, :, i] for i in range(3))
        attention_backward(scaled, *saved, grads=parts, **self._options)
        return grads.astype(dout.dtype) / tokens if narrow else grads


class ReferenceAttention:
    """Attention from its definition (:mod:`cuflash.reference`), in float64 on the host."""

    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """The output, and the inputs."""
        return reference.attention(q, k, v, causal=True)[0], (q, k, v)

    def backward(self, dout: Any, saved: Any) -> Any:
        """The gradients of q, k and v."""
        return np.stack(reference.attention_backward(dout, *saved, causal=True), axis=2)

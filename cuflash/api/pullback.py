"""The function that pulls gradients back through a call of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..tensors import QKV
from .backward import attention_backward

__all__ = ["Pullback"]


class Pullback:
    """The vector-Jacobian product of one call; made by :func:`attention_vjp`.

    It pickles if its arrays do: those of NumPy, CuPy, JAX and PyTorch.

    Parameters
    ----------
    saved
        q, k, v, out and lse of the forward pass, by name, and the arrays of features
        that were given.
    keywords
        Keywords of :func:`attention_backward`, as the caller gave them.

    Attributes
    ----------
    saved
        As given, not copied.
    """

    def __init__(self, saved: Mapping[str, Any], keywords: Mapping[str, Any]) -> None:
        self.saved = dict(saved)
        self._keywords = dict(keywords)

    @property
    def wrt(self) -> tuple[str, ...]:
        """Names of the arrays whose gradients it returns, in order."""
        return tuple(self._keywords.get("wrt", QKV))

    def __call__(self, dout: Any, dlse: Any = None) -> tuple[Any, ...]:
        """Return the gradients of the arrays of :attr:`wrt`.

        Parameters
        ----------
        dout : array, (batch, seqlen_q, heads_q, head_dim_v)
            Gradient of out, in its layout; of q's dtype or of out's.
        dlse : array, (batch, heads_q, seqlen_q), optional
            Gradient of lse; float32, or float64 for float64.

        Returns
        -------
        gradients : tuple of arrays
            In the order of :attr:`wrt`, as for :func:`attention_backward`.

        Raises
        ------
        CuflashError
            As for :func:`attention_backward`.
        """
        return attention_backward(dout, **self.saved, dlse=dlse, **self._keywords)

"""The layers other than attention, each with its gradient, for NumPy and CuPy."""

from __future__ import annotations

from typing import Any

__all__ = [
    "cross_entropy",
    "normalize",
    "normalize_backward",
    "rotate",
    "rotation",
    "squared_relu",
    "squared_relu_backward",
]

_EPSILON = 1e-6
#: Number of bytes over which the slowest pair rotates by one radian.
_SLOWEST = 1e3


def normalize(x: Any) -> tuple[Any, Any]:
    """Return rows divided by their root mean square, and the factors: RMSNorm without a gain.

    The gain would only scale the rows of the matrix that follows.
    """
    factors = (x * x).mean(axis=1, keepdims=True)
    factors += _EPSILON
    factors **= -0.5
    return x * factors, factors


def normalize_backward(dy: Any, y: Any, factors: Any) -> Any:
    """Return the gradient of :func:`normalize`, ``(dy - y <dy, y>) factors``, written to dy."""
    dy -= y * (dy * y).mean(axis=1, keepdims=True)
    dy *= factors
    return dy


def rotation(seqlen: int, heads: int, head_dim: int, dtype: Any, xp: Any) -> Any:
    """Return the rotary phases (Su et al. 2021) exp(i position frequency).

    The shape is (seqlen, 1, heads, pairs).
    """
    pairs = head_dim // 2
    frequencies = _SLOWEST ** (-xp.arange(pairs) / pairs)
    angles = xp.arange(seqlen)[:, None] * frequencies
    phases = xp.exp(1j * angles).astype(xp.result_type(dtype, xp.complex64))
    return xp.repeat(phases[:, None, None], heads, axis=2)


def rotate(rows: Any, phases: Any) -> Any:
    """Rotate neighbouring pairs of elements by their phase; the conjugate gives the gradient."""
    turned = rows.view(phases.dtype) * phases
    return turned.view(rows.dtype)


def squared_relu(x: Any, xp: Any) -> tuple[Any, Any]:
    """Return ``max(x, 0)``, written to x, and its square."""
    xp.maximum(x, 0, out=x)
    return x, x * x


def squared_relu_backward(dy: Any, positive: Any) -> Any:
    """Return the gradient of :func:`squared_relu`, written to ``dy``."""
    dy *= positive
    dy *= 2
    return dy


def cross_entropy(logits: Any, targets: Any, xp: Any) -> tuple[Any, Any]:
    """Return the mean negative log-likelihood in nats, and its gradient, written to ``logits``."""
    rows = xp.arange(targets.size)
    logits -= logits.max(axis=1, keepdims=True)
    chosen = logits[rows, targets]
    xp.exp(logits, out=logits)
    totals = logits.sum(axis=1, keepdims=True)
    loss = (xp.log(totals[:, 0]) - chosen).mean()
    logits /= totals * targets.size
    logits[rows, targets] -= 1 / targets.size
    return loss, logits

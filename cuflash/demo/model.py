"""A byte-level transformer and its gradient, written out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import layers
from .passes import Attention
from .text import BYTES

__all__ = ["Network", "Parameters", "Shape"]


@dataclass(frozen=True)
class Shape:
    """Sizes of a network."""

    layers: int
    heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Elements of a position between the layers."""
        return self.heads * self.head_dim

    @property
    def hidden(self) -> int:
        """Elements of a position inside a feed-forward layer."""
        return 4 * self.width

    def matrices(self) -> Iterator[tuple[str, tuple[int, int], float]]:
        """Name, shape and initial standard deviation of every matrix."""
        width, hidden = self.width, self.hidden
        # Every layer adds two terms to the residual sum.
        share = 1 / math.sqrt(2 * self.layers)
        yield "embedding", (BYTES, width), 1.0
        for i in range(self.layers):
            yield f"qkv {i}", (width, 3 * width), 1 / math.sqrt(width)
            yield f"out {i}", (width, width), share / math.sqrt(width)
            yield f"up {i}", (width, hidden), 1 / math.sqrt(width)
            yield f"down {i}", (hidden, width), share / math.sqrt(hidden)
        yield "head", (width, BYTES), 0.1 / math.sqrt(width)


class Parameters:
    """All matrices of a network, or their gradients, in one vector.

    The optimizer then works on one long array instead of dozens of short ones.

    Attributes
    ----------
    vector : array, (size,)
        All matrices, one after the other.
    matrices : dict
        Views of the vector, by name.
    """

    def __init__(self, shape: Shape, dtype: Any, xp: Any) -> None:
        self.shape = shape
        sizes = {name: size for name, size, _ in shape.matrices()}
        self.vector = xp.zeros(sum(math.prod(size) for size in sizes.values()), dtype)
        self.matrices: dict[str, Any] = {}
        start = 0
        for name, size in sizes.items():
            end = start + math.prod(size)
            self.matrices[name] = self.vector[start:end].reshape(size)
            start = end

    @classmethod
    def drawn(cls, shape: Shape, seed: int, dtype: Any, xp: Any) -> Parameters:
        """Draw normally distributed parameters; a seed gives the same on every device."""
        host = cls(shape, np.float64, np)
        generator = np.random.default_rng(seed)
        for name, size, deviation in shape.matrices():
            host.matrices[name][...] = deviation * generator.standard_normal(size)
        return host.copied(dtype, xp)

    def copied(self, dtype: Any, xp: Any) -> Parameters:
        """Return a copy in another dtype and array module."""
        vector = self.vector if isinstance(self.vector, np.ndarray) else self.vector.get()
        copy = Parameters(self.shape, dtype, xp)
        copy.vector[...] = xp.asarray(vector.astype(dtype))
        return copy

    def __getitem__(self, name: str) -> Any:
        return self.matrices[name]


class Network:
    """Pre-normalised transformer: rotary causal attention and a squared ReLU in every layer.

    Parameters
    ----------
    parameters : Parameters
        Its weights; they may change between calls.
    attention : Attention or None
        Computes attention; None for an output of zero.
    xp : module
        ``numpy`` or ``cupy``.
    """

    def __init__(self, parameters: Parameters, attention: Attention | None, xp: Any) -> None:
        self.parameters, self._attention, self._xp = parameters, attention, xp
        self._shape = parameters.shape
        self._phases: Any = None

    def logits(self, tokens: Any) -> Any:
        """Return the logits of the byte after each byte of ``tokens``, (batch, seqlen).

        The shape is (batch * seqlen, 256).
        """
        return self._logits(tokens)[0]

    def loss(self, tokens: Any, targets: Any) -> Any:
        """Return the mean negative log-likelihood of targets in nats per byte, on the device."""
        return layers.cross_entropy(self.logits(tokens), targets.reshape(-1), self._xp)[0]

    def gradients(self, tokens: Any, targets: Any, into: Parameters) -> Any:
        """Write the gradients of the loss, and return the loss.

        Parameters
        ----------
        tokens, targets : array, (batch, seqlen)
            Bytes, and the byte that follows each of them.
        into : Parameters
            Destination.
        """
        xp = self._xp
        logits, top, saved = self._logits(tokens)
        loss, dlogits = layers.cross_entropy(logits, targets.reshape(-1), xp)
        y, factors = top
        xp.matmul(y.T, dlogits, out=into["head"])
        dy = dlogits @ self.parameters["head"].T
        dx = layers.normalize_backward(dy, y, factors)
        for layer in reversed(range(self._shape.layers)):
            attention_saved, feed_saved = saved[layer]
            dx = self._feed_forward_backward(layer, dx, feed_saved, into)
            dx = self._attend_backward(layer, dx, attention_saved, into)
        # A product instead of a scatter: the order of its sums does not change from run to run.
        chosen = tokens.reshape(-1, 1) == xp.arange(BYTES)
        xp.matmul(chosen.T.astype(dx.dtype), dx, out=into["embedding"])
        return loss

    def _logits(self, tokens: Any) -> tuple[Any, Any, list[Any]]:
        x = self.parameters["embedding"][tokens.reshape(-1)]
        saved = []
        for layer in range(self._shape.layers):
            x, attention_saved = self._attend(layer, x, tokens.shape)
            x, feed_saved = self._feed_forward(layer, x)
            saved.append((attention_saved, feed_saved))
        y, factors = layers.normalize(x)
        return y @ self.parameters["head"], (y, factors), saved

    def _attend(self, layer: int, x: Any, tokens: tuple[int, int]) -> tuple[Any, Any]:
        if self._attention is None:
            return x, None
        y, factors = layers.normalize(x)
        qkv = (y @ self.parameters[f"qkv {layer}"]).reshape(*tokens, 3, *self._heads)
        qk = layers.rotate(qkv[:, :, :2], self._rotation(x, tokens[1]))
        out, saved = self._attention.forward(qk[:, :, 0], qk[:, :, 1], qkv[:, :, 2])
        rows = out.reshape(x.shape)
        result = rows @ self.parameters[f"out {layer}"]
        result += x
        return result, (y, factors, rows, tokens, saved)

    def _attend_backward(self, layer: int, dx: Any, saved: Any, into: Parameters) -> Any:
        if self._attention is None:
            return dx
        y, factors, rows, tokens, attention_saved = saved
        xp = self._xp
        xp.matmul(rows.T, dx, out=into[f"out {layer}"])
        dout = dx @ self.parameters[f"out {layer}"].T
        dqkv = self._attention.backward(dout.reshape(*tokens, *self._heads), attention_saved)
        turned = dqkv[:, :, :2]
        turned[...] = layers.rotate(turned, self._rotation(dx, tokens[1]).conj())
        flat = dqkv.reshape(dx.shape[0], -1)
        xp.matmul(y.T, flat, out=into[f"qkv {layer}"])
        dy = flat @ self.parameters[f"qkv {layer}"].T
        dx += layers.normalize_backward(dy, y, factors)
        return dx

    def _feed_forward(self, layer: int, x: Any) -> tuple[Any, Any]:
        y, factors = layers.normalize(x)
        positive, hidden = layers.squared_relu(y @ self.parameters[f"up {layer}"], self._xp)
        result = hidden @ self.parameters[f"down {layer}"]
        result += x
        return result, (y, factors, positive, hidden)

    def _feed_forward_backward(self, layer: int, dx: Any, saved: Any, into: Parameters) -> Any:
        y, factors, positive, hidden = saved
        xp = self._xp
        xp.matmul(hidden.T, dx, out=into[f"down {layer}"])
        dhidden = layers.squared_relu_backward(dx @ self.parameters[f"down {layer}"].T, positive)
        xp.matmul(y.T, dhidden, out=into[f"up {layer}"])
        dy = dhidden @ self.parameters[f"up {layer}"].T
        dx += layers.normalize_backward(dy, y, factors)
        return dx

    @property
    def _heads(self) -> tuple[int, int]:
        return self._shape.heads, self._shape.head_dim

    def _rotation(self, x: Any, seqlen: int) -> Any:
        if self._phases is None or self._phases.shape[0] < seqlen:
            self._phases = layers.rotation(seqlen, *self._heads, x.dtype, self._xp)
        return self._phases[:seqlen]

"""Writes text with a trained network, byte by byte, with keys and values in a paged cache."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..api import attention_with_kvcache
from . import layers
from .model import Parameters
from .options import Options

__all__ = ["PAGE", "Decoder"]

#: Number of bytes of the text whose keys and values are in one page.
PAGE = 16


class Decoder:
    """Draws byte after byte.

    A new byte costs one row of every product, since the cache keeps the keys
    and values of the earlier bytes. No step reads anything on the host: the
    length of the text is in device memory too, so that a graph can hold a step.

    Parameters
    ----------
    parameters : Parameters
        Weights of a trained network.
    options : Options
        Its sizes.
    noise : array, (length, 256)
        Noise that is added to the logits, one row for every byte of the longest
        text. The byte with the largest sum is written. With zeros for noise that
        is the likeliest byte.
    xp : module
        ``numpy`` or ``cupy``.

    Attributes
    ----------
    text : array of uint8, (length,)
        A prompt and the bytes written after it.
    logits : array of float32, (length, 256)
        The logits of every written byte, without the noise.
    """

    def __init__(self, parameters: Parameters, options: Options, noise: Any, xp: Any) -> None:
        self._parameters, self._noise, self._xp = parameters, noise, xp
        self._heads, self._dtype = (options.heads, options.head_dim), np.dtype(options.dtype)
        pages = -(-len(noise) // PAGE)
        shape = (pages, PAGE, *self._heads)
        self._caches = [
            (xp.zeros(shape, self._dtype), xp.zeros(shape, self._dtype))
            for _ in range(options.layers)
        ]
        self._cached = xp.zeros(1, np.int32)
        # Pages may be in any order; here they run backwards. All layers share the table.
        table = np.arange(pages, dtype=np.int32)[None, ::-1]
        phases = layers.rotation(pages * PAGE, 1, options.head_dim, np.float32, np)[:, 0, 0]
        # The algorithm is left to cuflash: not every one reads pages.
        self._options: dict[str, Any] = {
            "cache_seqlens": self._cached,
            "page_table": xp.asarray(table.copy()),
            "rotary_cos": xp.asarray(phases.real.copy()),
            "rotary_sin": xp.asarray(phases.imag.copy()),
            "rotary_interleaved": True,
            "causal": True,
            "window_size": options.window,
            "backend": options.backend,
        }
        self.text = xp.zeros(len(noise), np.uint8)
        self.logits = xp.zeros(noise.shape, np.float32)

    def begin(self, prompt: bytes) -> None:
        """Read a prompt in one step, from empty caches, and write the byte after it."""
        self._cached.fill(0)
        self.text[: len(prompt)] = self._xp.asarray(np.frombuffer(prompt, np.uint8))
        self._advance(self.text[: len(prompt)])

    def step(self) -> None:
        """Read the last byte, which no cache holds yet, and write the one after it."""
        self._advance(self.text[self._cached])

    def _advance(self, tokens: Any) -> None:
        logits = self._logits(tokens)
        self._cached += tokens.size
        self.logits[self._cached] = logits
        self.text[self._cached] = (logits + self._noise[self._cached]).argmax(axis=1)

    def _logits(self, tokens: Any) -> Any:
        """Return the logits of the byte after the new bytes ``tokens``: (1, 256)."""
        x = self._parameters["embedding"][tokens]
        for layer in range(len(self._caches)):
            x = x + self._attend(layer, x)
            y, _ = layers.normalize(x)
            _, hidden = layers.squared_relu(self._product(y, f"up {layer}"), self._xp)
            x = x + self._product(hidden, f"down {layer}")
        y, _ = layers.normalize(x[-1:])
        return self._product(y, "head")

    def _attend(self, layer: int, x: Any) -> Any:
        """Rotate q and k, append k and v to the layer's caches, and attend, in one call."""
        y, _ = layers.normalize(x)
        qkv = self._product(y, f"qkv {layer}").astype(self._dtype, copy=False)
        q, k, v = (part.reshape(1, -1, *self._heads) for part in self._xp.split(qkv, 3, axis=1))
        out = attention_with_kvcache(q, *self._caches[layer], k, v, **self._options)
        return self._product(out.reshape(x.shape).astype(x.dtype, copy=False), f"out {layer}")

    def _product(self, x: Any, name: str) -> Any:
        matrix = self._parameters[name]
        if self._xp is np:
            return x @ matrix
        return _product(self._xp)(x[:, :, None], matrix, axis=1)


@functools.cache
def _product(xp: Any) -> Any:
    """Return a kernel for products of few rows: CuPy cannot capture cuBLAS in a graph."""
    return xp.ReductionKernel("T x, T w", "T y", "x * w", "a + b", "y = a", "0", "few_rows")

"""Generates a text with a cache of keys and values, and checks it without one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .decoder import Decoder
from .model import Network, Parameters
from .options import DTYPES, Options
from .passes import CuflashAttention
from .text import BYTES

__all__ = ["PROMPT", "Generated", "generate"]

#: The beginning of the text.
PROMPT = b"The statement "
#: Temperature of the softmax that bytes are drawn from: below 1 it favours the likely bytes.
_TEMPERATURE = 0.7


@dataclass(frozen=True)
class Generated:
    """A text, and the results of computing it again without a cache.

    Attributes
    ----------
    prompt, text : bytes
        The given bytes, and the bytes written after them with the cache.
    rates : dict
        Bytes per second with the cache and without it; each way reads the prompt too.
    recomputed : bytes
        The bytes that are chosen without a cache, one for each byte of ``text``.
    apart : array, (bytes,)
        Largest difference of the two ways' logits.
    rounding : array, (bytes,)
        Largest difference allowed: the dtype's tolerance times the largest logit.
    """

    prompt: bytes
    text: bytes
    rates: dict[str, float]
    recomputed: bytes
    apart: NDArray[np.float32]
    rounding: NDArray[np.float32]

    @property
    def ties(self) -> int:
        """Number of bytes that differ though their logits agree: two bytes were equally good."""
        return sum(a != b for a, b in zip(self.text, self.recomputed, strict=True))

    @property
    def wrong(self) -> list[int]:
        """Positions of the bytes whose logits differ by more than the rounding."""
        return [int(i) for i in np.flatnonzero(~(self.apart <= self.rounding))]


def generate(
    parameters: Parameters, options: Options, xp: Any, prompt: bytes = PROMPT
) -> Generated:
    """Write ``options.generate`` bytes with a cache, then choose each of them without one.

    The second way reads the bytes that the first way wrote. If it chooses the
    same bytes, it would have written the same text. Rounding may decide between
    two bytes that are almost equally likely, so the logits are compared: they
    must agree for every byte, also after a tie.

    Both ways add the same Gumbel noise to the logits and choose the largest sum,
    which draws a byte from the softmax.

    Parameters
    ----------
    parameters : Parameters
        Weights of a trained network.
    options : Options
        Sizes of the network, and where attention runs.
    xp : module
        ``numpy`` or ``cupy``.
    prompt : bytes
        The beginning of the text.
    """
    attention = CuflashAttention(
        xp, options.dtype, options.backend, options.algorithm, options.window
    )
    network = Network(parameters, attention, xp)
    begin, end = len(prompt), len(prompt) + options.generate
    drawn = np.random.default_rng(options.seed).gumbel(size=(end + 1, BYTES))  # one for warm-up
    noise = (_TEMPERATURE * drawn).astype(np.float32)
    with _stream(xp):
        decoder = Decoder(parameters, options, xp.asarray(noise), xp)
        decoder.begin(prompt)
        how, step = _replayed(decoder.step, xp)

        def write() -> None:
            decoder.begin(prompt)
            for _ in range(options.generate - 1):
                step()

        logits = xp.empty((options.generate, BYTES), np.float32)

        def recompute() -> None:
            for i in range(options.generate):
                logits[i] = network.logits(decoder.text[None, : begin + i])[-1]

        rates = {
            f"with a paged cache, {how}": options.generate / _seconds(write, xp),
            "recomputed for every byte": options.generate / _seconds(recompute, xp),
        }
        text = _on_host(decoder.text)[begin:end].tobytes()
        cached, truth = _on_host(decoder.logits)[begin:end], _on_host(logits)
    recomputed = (truth + noise[begin:end]).argmax(axis=1).astype(np.uint8).tobytes()
    apart = np.abs(cached - truth).max(axis=1)
    rounding = DTYPES[options.dtype] * np.abs(truth).max(axis=1)
    return Generated(prompt, text, rates, recomputed, apart, rounding)


def _replayed(step: Callable[[], None], xp: Any) -> tuple[str, Callable[[], None]]:
    """Return a description of a step and the step: one graph on a GPU, unchanged on a CPU.

    A step writes its results to arrays that exist before the capture. Its
    temporary arrays are in a memory pool that nothing else uses.
    """
    if xp is np:
        return "call by call", step
    stream, pool = xp.cuda.get_current_stream(), xp.cuda.MemoryPool()
    with xp.cuda.using_allocator(pool.malloc):
        step()  # compiles, and fills the pool
        stream.begin_capture()
        step()
        graph = stream.end_capture()

    def replay(_held: Any = pool) -> None:
        graph.launch(stream)

    return "one graph, replayed", replay


def _seconds(run: Callable[[], None], xp: Any) -> float:
    """Return the duration of the second of two runs: the first one compiles."""
    run()
    _wait(xp)
    began = time.perf_counter()
    run()
    _wait(xp)
    return time.perf_counter() - began


def _stream(xp: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a stream that a graph can be captured from; CuPy's default stream cannot."""
    if xp is np:
        return contextlib.nullcontext()
    _wait(xp)
    stream: contextlib.AbstractContextManager[Any] = xp.cuda.Stream(non_blocking=True)
    return stream


def _wait(xp: Any) -> None:
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()


def _on_host(array: Any) -> NDArray[Any]:
    host: NDArray[Any] = array if isinstance(array, np.ndarray) else array.get()
    return host

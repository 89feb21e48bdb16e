"""The same text twice: with a cache of keys and values, and all over again for every byte."""

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

#: What the text begins with.
PROMPT = b"The statement "
#: Of the softmax that bytes are drawn from: below 1 the likely ones are likelier yet.
_TEMPERATURE = 0.7


@dataclass(frozen=True)
class Generated:
    """A text, and what a second computation of it says.

    Attributes
    ----------
    prompt, text : bytes
        What was given, and what was written behind it with the cache.
    rates : dict
        Bytes per second by way; each way reads the prompt too.
    recomputed : bytes
        What is chosen without a cache in the place of each of them.
    apart : array, (bytes,)
        How far the logits of the two ways are from each other, at most.
    rounding : array, (bytes,)
        How far they may be: the dtype's tolerance times the largest logit.
    """

    prompt: bytes
    text: bytes
    rates: dict[str, float]
    recomputed: bytes
    apart: NDArray[np.float32]
    rounding: NDArray[np.float32]

    @property
    def ties(self) -> int:
        """Bytes that differ though the logits do not: two were as good as each other."""
        return sum(a != b for a, b in zip(self.text, self.recomputed, strict=True))

    @property
    def wrong(self) -> list[int]:
        """Places of the bytes whose logits differ by more than the rounding."""
        return [int(i) for i in np.flatnonzero(~(self.apart <= self.rounding))]


def generate(
    parameters: Parameters, options: Options, xp: Any, prompt: bytes = PROMPT
) -> Generated:
    """Write ``options.generate`` bytes with a cache, then choose each of them without one.

    The second way gets the bytes that the first wrote. Where it chooses the
    same ones it would have written the same text. Two bytes can be so nearly as
    good that rounding chooses between them, so it is the logits that are judged:
    they must agree for every byte, and the bytes after a tie are compared too.

    Bytes are drawn from the softmax
    by noise that is the same for both ways: the largest of logits with Gumbel
    noise is such a draw.

    Parameters
    ----------
    parameters : Parameters
        Weights of a trained network.
    options : Options
        Its sizes, and where attention runs.
    xp : module
        ``numpy`` or ``cupy``.
    prompt : bytes
        What the text begins with.
    """
    attention = CuflashAttention(
        xp, options.dtype, options.backend, options.algorithm, options.window
    )
    network = Network(parameters, attention, xp)
    begin, end = len(prompt), len(prompt) + options.generate
    drawn = np.random.default_rng(options.seed).gumbel(size=(end + 1, BYTES))  # one to rehearse
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
    """A step as one graph, which the device repeats by itself; on a CPU the step itself.

    What a step leaves behind is in arrays that there were before, and what it
    needs in between is in a pool that nobody else is given memory from.
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
    """How long the second of two runs takes: the first one compiles."""
    run()
    _wait(xp)
    began = time.perf_counter()
    run()
    _wait(xp)
    return time.perf_counter() - began


def _stream(xp: Any) -> contextlib.AbstractContextManager[Any]:
    """One that a graph can be captured from: CuPy's default stream is none."""
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

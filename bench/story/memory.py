"""Extra memory by length: what a call takes from CuPy's pool besides inputs and results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..cases import Case
from ..inputs import Inputs, array_module
from ..sources import digest_now
from . import speed, standard
from .speed import DTYPE, GENERATIONS, STANDARD

__all__ = ["LENGTHS", "PASSES", "cases", "measure"]

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
HEADS, WIDTH = 4, 64
#: The results of a call: its output, or also the gradients.
PASSES = ("forward", "forward and backward")

#: Runs a function; returns its results and the most bytes that it held at once.
Peak = Callable[[Callable[[], Any]], tuple[Any, int]]


def cases() -> list[Case]:
    """One case for each length."""
    return [
        Case("forward", DTYPE, 1, HEADS, HEADS, WIDTH, WIDTH, n, n, False, GENERATIONS[-1])
        for n in LENGTHS
    ]


def measure(
    make: Callable[[Case], Inputs], peak: Peak, free_bytes: Callable[[], int]
) -> Iterator[dict[str, Any]]:
    """Rows with the extra bytes of every length, implementation and pass, or why there are none.

    Parameters
    ----------
    make
        Makes the arrays of a case.
    peak
        Runs a call and returns its results and its memory.
    free_bytes
        The free memory of the device.
    """
    for case in cases():
        inputs = make(case)
        for name in (STANDARD, *GENERATIONS):
            for done in PASSES:
                row: dict[str, Any] = {
                    "part": "memory",
                    "label": name if name == STANDARD else f"cuflash {name}",
                    "sources": None if name == STANDARD else digest_now(name, done),
                    "pass": done,
                    "dtype": case.dtype,
                    "heads": case.heads_q,
                    "head_dim": case.head_dim,
                    "seqlen": case.seqlen_q,
                    "skipped": None,
                    "extra_bytes": None,
                }
                try:
                    row["extra_bytes"] = _extra(name, done, case, inputs, peak, free_bytes)
                except Exception as error:  # mostly out of memory
                    row["skipped"] = speed.reason_of(error)
                yield row


def _extra(
    name: str, done: str, case: Case, inputs: Inputs, peak: Peak, free_bytes: Callable[[], int]
) -> int:
    if name == STANDARD:
        # In units of a 16-bit matrix: P is 1, a product in float32 is 2, and dS of the backward
        # pass is 1.
        squares = 3 if done == "forward" else 4
        needed = squares * 2 * case.scores
        if needed > free_bytes():
            raise MemoryError(standard.too_large(needed, free_bytes()))
        call = _standard(done, case, inputs)
    else:
        call = _ours(name, done, inputs)
    if name != STANDARD or case.seqlen_q == LENGTHS[0]:
        call()  # loads kernels, and allocates what stays, such as cuBLAS workspace
    results, most = peak(call)
    return most - sum(int(array.nbytes) for array in results)


def _ours(name: str, done: str, inputs: Inputs) -> Callable[[], list[Any]]:
    import cuflash

    q, k, v = inputs.q, inputs.k, inputs.v
    algorithm: Any = name

    def forward() -> list[Any]:
        return [cuflash.attention(q, k, v, algorithm=algorithm)]

    def both() -> list[Any]:
        out, pullback = cuflash.attention_vjp(q, k, v, algorithm=algorithm)
        return [out, *pullback(inputs.dout)]

    return forward if done == "forward" else both


def _standard(done: str, case: Case, inputs: Inputs) -> Callable[[], list[Any]]:
    xp = array_module(inputs.q)

    def flat(array: Any) -> Any:
        return xp.ascontiguousarray(array[0].swapaxes(0, 1))

    q, k, v, dout = (flat(array) for array in (inputs.q, inputs.k, inputs.v, inputs.dout))
    scale = q.dtype.type(case.head_dim**-0.5)

    def forward() -> list[Any]:
        return [standard.forward(q, k, v, scale, None)[0]]

    def both() -> list[Any]:
        kept = standard.forward(q, k, v, scale, None)
        return [kept[0], *standard.backward((q, k, v), kept, dout, scale)]

    return forward if done == "forward" else both

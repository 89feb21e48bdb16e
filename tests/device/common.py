"""Helpers that the tests of this folder share."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import calls

from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.limits import UNIT
from ..kit.oracle import Truth, judge

__all__ = [
    "Gradients",
    "Hog",
    "Problem",
    "gradients_on_two_streams",
    "hold",
    "jitter",
    "last_heads",
    "same_gradients",
    "skip_without",
]


def skip_without(algorithm: str) -> None:
    """Skip a test of FlashAttention-3 unless the device is a Hopper GPU."""
    import cupy

    capability = cupy.cuda.Device().compute_capability
    if algorithm == "fa3" and capability != "90":
        pytest.skip(f"not on this device: fa3 is for compute capability 9.0, this is {capability}")


def last_heads(case: Case, name: str, array: np.ndarray) -> np.ndarray:
    """The last heads of the last batch entry, as many as ``case`` has."""
    heads = case.heads_kv if name in ("k", "v", "dk", "dv") else case.heads_q
    if name == "sinks":
        return array[-heads:]
    return array[-1:, -heads:] if name in ("lse", "dlse") else array[-1:, :, -heads:]


def same_gradients(got: Sequence[Any], expected: Sequence[Any], ordered: bool) -> bool:
    """Whether gradients have the same bits, except a dq that is summed in no fixed order.

    A dq sums a few float32 parts. In another order the sum differs by less than 2^-18 of the
    largest, and may be rounded to a neighbour. float16 only.
    """
    alike = range(0 if ordered else 1, 3)
    if not all(bool((got[i] == expected[i]).all()) for i in alike):
        return False
    one, other = (array[0].astype(np.float32) for array in (got, expected))
    allowed = 2 * UNIT["float16"] * abs(other) + 2.0**-18 * abs(other).max()
    return ordered or bool((abs(one - other) <= allowed).all())


@contextmanager
def jitter() -> Iterator[None]:
    """Kernels that are made inside wait a random time at every barrier."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUFLASH_JITTER", "1")
        calls.forget()  # it holds the kernels that run already
        yield
    calls.forget()


class Hog:
    """Copies on a stream of their own, so that blocks of a pass run at odd times."""

    def __init__(self, cp: Any) -> None:
        self.stream = cp.cuda.Stream(non_blocking=True)
        self.arrays = [cp.zeros(2**27, np.uint8) for _ in range(2)]

    def copy(self) -> None:
        """Queue more copies."""
        with self.stream:
            for _ in range(4):
                self.arrays[0][...] = self.arrays[1]


_SPIN = """extern "C" __global__ void spin(long long n) {
  long long t = clock64(); while (clock64() - t < n) {}
}"""


def own_stream(cp: Any) -> Any:
    """A stream that does not wait for the default one, whose work is done."""
    cp.cuda.Device().synchronize()
    return cp.cuda.Stream(non_blocking=True)


def hold(cp: Any, streams: Sequence[Any], cycles: int = 300_000_000) -> None:
    """Stop streams for a sixth of a second, so that work queued on them then runs together."""
    holder = cp.cuda.Stream(non_blocking=True)
    with holder:
        cp.RawKernel(_SPIN, "spin")((1,), (1,), (np.int64(cycles),))
    event = holder.record()
    for stream in streams:
        stream.wait_event(event)


class Problem:
    """Forward passes of FlashAttention-3 over the same inputs; results are compared as bits.

    Parameters
    ----------
    cp : module
        CuPy.
    case : Case
        16-bit, in the layout "bshd".
    **options
        More keywords of the call.
    """

    def __init__(self, cp: Any, case: Case, **options: Any) -> None:
        self._cp, self.case = cp, case
        self.x = arrays(case, "q", "k", "v", *["sinks"] * bool(case.sinks))
        self.inputs = [cp.asarray(self.x[name]) for name in "qkv"]
        self.options: dict[str, Any] = {**case.options, "algorithm": "fa3", **options}
        self.options |= {name: cp.asarray(self.x[name]) for name in self.x.keys() & {"sinks"}}

    def prepare(self) -> cuflash.Prepared:
        """The pass, compiled."""
        return cuflash.prepare(*self.inputs, **self.options)

    def destinations(self) -> tuple[Any, Any]:
        """Out and lse, not written yet, as unsigned integers."""
        return tuple(self._cp.empty(self.case.shape(name), kind) for name, kind in _BITS)

    def poison(self, bits: tuple[Any, Any]) -> None:
        """Fill with NaNs of a kind that no pass produces."""
        for array in bits:
            array.fill(np.iinfo(array.dtype).max)

    def launch(self, bits: tuple[Any, Any]) -> None:
        """One pass on the current stream; nothing waits for it."""
        out, lse = self.typed(bits)
        cuflash.attention(*self.inputs, out=out, lse_out=lse, **self.options)

    def typed(self, bits: tuple[Any, Any]) -> tuple[Any, Any]:
        """The same memory as numbers."""
        return bits[0].view(self.case.storage), bits[1].view(np.float32)

    def first(self) -> tuple[Any, Any]:
        """The results of one pass; the last group of heads is compared with the truth."""
        bits = self.destinations()
        self.poison(bits)
        self.launch(bits)
        last = replace(self.case, batch=1, heads_q=self.case.group, heads_kv=1)
        truth = judge(last, {name: last_heads(last, name, x) for name, x in self.x.items()})
        for name, array in zip(("out", "lse"), self.typed(bits), strict=True):
            compare(truth, name, last_heads(last, name, array.get())).check()
        return bits

    def differ(self, one: tuple[Any, Any], other: tuple[Any, Any]) -> Any:
        """The number of differing elements, on the device."""
        return sum((a != b).sum() for a, b in zip(one, other, strict=True))


_BITS = (("out", np.uint16), ("lse", np.uint32))


class Gradients:
    """Backward passes of FlashAttention-3 over the same inputs.

    dk and dv, and dsinks with sinks, are compared as bits. dq is summed in no fixed order unless
    one is requested, so the last group of heads is compared with the truth.

    Parameters
    ----------
    cp : module
        CuPy.
    case : Case
        16-bit, in the layout "bshd".
    ordered : bool
        Sum dq in one order, and compare its bits too.
    """

    def __init__(self, cp: Any, case: Case, ordered: bool = False) -> None:
        self._cp, self.case, self._ordered = cp, case, ordered
        self.x = arrays(case, "q", "k", "v", "dout", "dlse", *["sinks"] * bool(case.sinks))
        self.options: dict[str, Any] = {**case.options, "algorithm": "fa3"}
        given = {name: cp.asarray(array) for name, array in self.x.items()}
        self.options |= {name: given[name] for name in given.keys() & {"sinks"}}
        self._qkv = tuple(given[name] for name in "qkv")
        saved = cuflash.attention(*self._qkv, return_lse=True, **self.options)
        self._inputs = (given["dout"], *self._qkv, *saved)
        self._dlse = given["dlse"]

    @functools.cached_property
    def truth(self) -> Truth:
        """The truth of the last group of heads."""
        last = replace(self.case, batch=1, heads_q=self.case.group, heads_kv=1)
        return judge(last, {name: last_heads(last, name, x) for name, x in self.x.items()})

    def prepare(self) -> cuflash.Prepared:
        """The pass, compiled."""
        return cuflash.prepare(*self._qkv, operation="backward", **self._of_backward)

    @property
    def _of_backward(self) -> dict[str, Any]:
        wrt = {"wrt": ("q", "k", "v", "sinks")} if self.case.sinks else {}
        return {**self.options, "deterministic": self._ordered, **wrt}

    def destinations(self) -> tuple[Any, ...]:
        """The gradients, not written yet, as unsigned integers."""
        kinds = {2: np.uint16, 4: np.uint32}
        return tuple(
            self._cp.empty(self.case.shape(name), kinds[self.case.dtype_of(name).itemsize])
            for name in self.case.gradients
        )

    def poison(self, bits: tuple[Any, ...]) -> None:
        """Fill with NaNs of a kind that no pass produces."""
        for array in bits:
            array.fill(np.iinfo(array.dtype).max)

    def launch(self, bits: tuple[Any, ...]) -> None:
        """One pass on the current stream; nothing waits for it."""
        named = zip(bits, self.case.gradients, strict=True)
        grads = tuple(array.view(self.case.dtype_of(name)) for array, name in named)
        cuflash.attention_backward(*self._inputs, dlse=self._dlse, grads=grads, **self._of_backward)

    def of_another(self, algorithm: Any) -> tuple[Any, ...]:
        """The gradients of another generation."""
        options = {**self._of_backward, "algorithm": algorithm}
        return cuflash.attention_backward(*self._inputs, dlse=self._dlse, **options)

    def first(self) -> tuple[Any, ...]:
        """The results of one pass, compared with the truth."""
        bits = self.destinations()
        self.poison(bits)
        self.launch(bits)
        for name, array in zip(_GRADIENTS, bits[:3], strict=True):
            self.check(name, self.last(name, array))
        return bits

    def last(self, name: str, bits: Any) -> Any:
        """A copy of the last group of heads of one gradient."""
        return last_heads(self.truth.case, name, bits).copy()

    def check(self, name: str, last: Any) -> None:
        """Compare such a copy with the truth."""
        compare(self.truth, name, last.get().view(self.case.storage)).check()

    def differ(self, one: tuple[Any, ...], other: tuple[Any, ...]) -> Any:
        """The number of differing elements, on the device; those of dq only if it has an order."""
        alike = slice(0 if self._ordered else 1, None)
        return sum((a != b).sum() for a, b in zip(one[alike], other[alike], strict=True))


_GRADIENTS = ("dq", "dk", "dv")


def gradients_on_two_streams(cp: Any, passes: Sequence[Gradients], times: int) -> None:
    """Launch every pass ``times`` times on each of two streams at once, and check the results.

    dK and dV must have the bits of a pass that runs alone, and dQ must be right.
    """
    firsts = [gradients.first() for gradients in passes]
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(2)]
    work = [
        (gradients, first, [gradients.destinations() for _ in streams])
        for gradients, first in zip(passes, firsts, strict=True)
        for _ in range(times)
    ]
    for gradients, _, targets in work:
        for bits in targets:
            gradients.poison(bits)
    cp.cuda.Device().synchronize()
    hold(cp, streams)
    for gradients, _, targets in work:
        for stream, bits in zip(streams, targets, strict=True):
            with stream:
                gradients.launch(bits)
    cp.cuda.Device().synchronize()
    for gradients, first, targets in work:
        for bits in targets:
            assert int(gradients.differ(bits, first)) == 0
            gradients.check("dq", gradients.last("dq", bits[0]))

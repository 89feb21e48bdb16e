"""What the tests of this folder share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash

from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.oracle import judge

__all__ = ["Hog", "Problem", "backward_of", "hold", "last_heads", "skip_without"]


def skip_without(algorithm: str) -> None:
    """Skip a test of FlashAttention-3 on a device that is not of its kind."""
    import cupy

    capability = cupy.cuda.Device().compute_capability
    if algorithm == "fa3" and capability != "90":
        pytest.skip(f"not on this device: fa3 is for compute capability 9.0, this is {capability}")


def backward_of(algorithm: str) -> str:
    """What the gradients of a forward pass are asked of: FlashAttention-3 has none."""
    return "auto" if algorithm == "fa3" else algorithm


def last_heads(case: Case, name: str, array: np.ndarray) -> np.ndarray:
    """The last heads of the last batch entry, as many as ``case`` has."""
    heads = case.heads_kv if name in ("k", "v", "dk", "dv") else case.heads_q
    return array[-1:, -heads:] if name in ("lse", "dlse") else array[-1:, :, -heads:]


class Hog:
    """Copies on a stream of their own, so that blocks of a pass run at odd times."""

    def __init__(self, cp: Any) -> None:
        self.stream = cp.cuda.Stream(non_blocking=True)
        self.arrays = [cp.zeros(2**27, np.uint8) for _ in range(2)]

    def copy(self) -> None:
        """Have some more under way."""
        with self.stream:
            for _ in range(4):
                self.arrays[0][...] = self.arrays[1]


_SPIN = """extern "C" __global__ void spin(long long n) {
  long long t = clock64(); while (clock64() - t < n) {}
}"""


def hold(cp: Any, streams: Sequence[Any], cycles: int = 300_000_000) -> None:
    """Hold streams up for a sixth of a second: what is queued on them meanwhile runs at once."""
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
        self.x = arrays(case, "q", "k", "v")
        self.inputs = [cp.asarray(self.x[name]) for name in "qkv"]
        self.options: dict[str, Any] = {**case.options, "algorithm": "fa3", **options}

    def prepare(self) -> cuflash.Prepared:
        """The pass, compiled."""
        return cuflash.prepare(*self.inputs, **self.options)

    def destinations(self) -> tuple[Any, Any]:
        """Out and lse, not written yet, as unsigned integers."""
        return tuple(self._cp.empty(self.case.shape(name), kind) for name, kind in _BITS)

    def poison(self, bits: tuple[Any, Any]) -> None:
        """Fill with NaNs of a kind that no pass gives."""
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
        """The results of one pass, of which the last group of heads is held to the truth."""
        bits = self.destinations()
        self.poison(bits)
        self.launch(bits)
        last = replace(self.case, batch=1, heads_q=self.case.group, heads_kv=1)
        truth = judge(last, {name: last_heads(last, name, x) for name, x in self.x.items()})
        for name, array in zip(("out", "lse"), self.typed(bits), strict=True):
            compare(truth, name, last_heads(last, name, array.get())).check()
        return bits

    def differ(self, one: tuple[Any, Any], other: tuple[Any, Any]) -> Any:
        """How many elements differ, on the device."""
        return sum((a != b).sum() for a, b in zip(one, other, strict=True))


_BITS = (("out", np.uint16), ("lse", np.uint32))

"""Guarded buffers: they watch the memory around, between and inside the tensors of a call.

Every tensor lies in one raw allocation: a margin, the tensor with the gaps of its strides, a
margin. Margins, gaps, outputs and workspace hold NaNs of particular bits, one pattern around inputs
and another one in memory that the call writes. After the call no margin, gap or input may have
changed a bit, and no element of an output may still hold either pattern. A write or read beyond a
margin goes unnoticed here; compute-sanitizer notices it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .strides import CONTIGUOUS, Placement, Strides, strided_view

__all__ = ["POISONS", "Arena"]

#: The smallest margin, in elements and in bytes.
MARGIN_ELEMENTS = 512
MARGIN_BYTES = 4096
#: The alignment of buffers, which ``workspace=`` needs.
ALIGNMENT = 256

#: Bits around and between the elements of inputs, and bits of memory that the call writes. The
#: second poison is for running everything twice: a result that depends on poison differs.
POISONS: dict[str, dict[str, tuple[int, int]]] = {
    "nan": {
        **dict.fromkeys(("uint32", "int32"), (0xB6B6B6B6, 0xB6B6B6B6)),
        "bool": (1, 1),  # read beyond an array, it shows pairs that a mask hides
        "float16": (0x7E6B, 0x7EA5),
        "bfloat16": (0x7FE6, 0x7FDA),
        "float32": (0x7FC6B6B6, 0x7FC5A5A5),
        "float64": (0x7FF86B6B6B6B6B6B, 0x7FF85A5A5A5A5A5A),
    },
    "huge": {
        **dict.fromkeys(("uint32", "int32"), (0x5A5A5A5A, 0x5A5A5A5A)),
        "bool": (0, 0),
        "float16": (0x7BF1, 0x7BF3),  # about 65,000
        "bfloat16": (0x7F61, 0x7F63),  # about 3e38
        "float32": (0x7F61B1B1, 0x7F63B1B1),
        "float64": (0x7FE1B1B1B1B1B1B1, 0x7FE3B1B1B1B1B1B1),
    },
}


@dataclass(frozen=True)
class _Buffer:
    """One tensor with its surroundings; ``before`` is its host image at the start."""

    name: str
    kind: str  # input, output or scratch
    raw: Any  # uint8, of the array module
    before: np.ndarray  # uint8
    placement: Placement
    margin: int  # in elements
    itemsize: int
    patterns: tuple[int, int]

    def words(self, image: np.ndarray) -> np.ndarray:
        """The bits of every element's slot, with margins and gaps."""
        return image.view(f"u{self.itemsize}")

    def elements(self, words: np.ndarray) -> np.ndarray:
        """The tensor's elements, in its shape, from an array with one item for each word."""
        return strided_view(words[self.margin :], self.placement)


class Arena:
    """The buffers of one call.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``cupy``: where the buffers are.
    poison : {"nan", "huge"}
        The fill of everything but the inputs' elements.
    """

    def __init__(self, xp: Any = np, poison: str = "nan") -> None:
        self._xp = xp
        self.poison = poison
        self._poison = POISONS[poison]
        self._buffers: list[_Buffer] = []

    def input(self, name: str, values: np.ndarray, recipe: Strides = CONTIGUOUS) -> Any:
        """An array of the values, constant along the recipe's broadcast axes."""
        return self._place(name, "input", values.shape, values.dtype, recipe, values)

    def output(
        self, name: str, shape: tuple[int, ...], dtype: Any, recipe: Strides = CONTIGUOUS
    ) -> Any:
        """A poisoned array that the call must write entirely."""
        return self._place(name, "output", shape, np.dtype(dtype), recipe, None)

    def workspace(self, nbytes: int, name: str = "workspace") -> Any:
        """Poisoned uint8, 256-byte aligned; read as 32-bit integers it is a huge index."""
        words = -(-nbytes // 4)
        array = self._place(name, "scratch", (words,), np.dtype(np.float32), CONTIGUOUS, None)
        return array.view(np.uint8)[:nbytes]

    def check(self, repro: str = "") -> None:
        """Raise AssertionError if the call wrote forbidden memory, or left out an element."""
        faults = [fault for buffer in self._buffers for fault in self._faults(buffer)]
        if faults:
            raise AssertionError("\n".join([*faults, f"repro: {repro}"]))

    def _place(
        self,
        name: str,
        kind: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        recipe: Strides,
        values: np.ndarray | None,
    ) -> Any:
        itemsize = dtype.itemsize
        patterns = self._poison[dtype.name]
        margin = max(MARGIN_ELEMENTS * itemsize, MARGIN_BYTES)
        count = margin // itemsize
        placement = recipe.place(shape)
        before = np.empty(2 * margin + placement.extent * itemsize, np.uint8)
        before.view(f"u{itemsize}")[:] = patterns[kind != "input"]
        if values is not None:
            host = strided_view(before.view(dtype)[count:], placement)
            host[...] = values
            if recipe.broadcast and host.tobytes() != values.tobytes():
                raise ValueError(f"{name} is not constant along the axes {recipe.broadcast}")
        raw = self._aligned(before)
        self._buffers.append(_Buffer(name, kind, raw, before, placement, count, itemsize, patterns))
        return strided_view(raw.view(dtype)[count:], placement, self._xp)

    def _aligned(self, image: np.ndarray) -> Any:
        """The image in an allocation of the array module, at a multiple of 256."""
        raw = self._xp.empty(image.size + ALIGNMENT, np.uint8)
        address = raw.ctypes.data if self._xp is np else raw.data.ptr
        skip = -address % ALIGNMENT
        raw = raw[skip : skip + image.size]
        if self._xp is np:
            raw[:] = image
        else:
            raw.set(image)
        return raw

    def _faults(self, buffer: _Buffer) -> list[str]:
        after = buffer.raw if self._xp is np else self._xp.asnumpy(buffer.raw)
        words = buffer.words(after)
        changed = words != buffer.words(buffer.before)
        faults = []
        if changed.any():
            own = np.zeros(words.size, bool)
            buffer.elements(own)[...] = True
            if (changed & ~own).any():
                own = np.repeat(own, buffer.itemsize)
                faults.append(_describe(buffer, (after != buffer.before) & ~own, own))
        inside = buffer.elements(changed)
        if buffer.kind == "input" and inside.any():
            element = _first(inside)
            faults.append(f"{buffer.name}: the input was written, first at {element}")
        if buffer.kind == "output" and inside.size:
            faults += _left_over(buffer, buffer.elements(words))
        return faults


def _left_over(buffer: _Buffer, words: np.ndarray) -> list[str]:
    around, inside = (words == pattern for pattern in buffer.patterns)
    faults = []
    for left, reason in (
        (inside, "not written, or computed from what was not"),
        (around, "computed from memory beside an input"),
    ):
        if left.any():
            said = f"{left.sum()} elements {reason}, first {_first(left)}"
            faults.append(f"{buffer.name}: {said}")
    return faults


def _describe(buffer: _Buffer, changed: np.ndarray, own: np.ndarray) -> str:
    """Where the surroundings were written, relative to the nearer end of the tensor."""
    first = int(np.argmax(changed))
    inside = np.flatnonzero(own)
    if inside.size and first < inside[0]:
        where = f"{inside[0] - first} bytes before it"
    elif inside.size and first < inside[-1]:
        where = f"in a gap of its strides, {first - inside[0]} bytes after its first byte"
    else:
        end = inside[-1] + 1 if inside.size else 0
        where = f"{first - end} bytes behind its end"
    return f"{buffer.name} ({buffer.kind}): {changed.sum()} bytes written beside it, first {where}"


def _first(marked: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(marked)[0])

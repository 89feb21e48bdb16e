"""The memory layout of one tensor: a recipe that any shape can follow."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["CONTIGUOUS", "Placement", "Strides", "any_recipe", "boxed", "strided_view"]

#: The stride, in elements, of an axis of one element with an absurd stride: beyond all memory, and
#: not a multiple of 16 bytes.
ABSURD = 2**40 + 1


@dataclass(frozen=True)
class Placement:
    """A recipe applied to a shape; all numbers in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int  # of the element at index 0
    extent: int  # from the first requested byte to the last element's end


@dataclass(frozen=True)
class Strides:
    """A recipe of strides; axes are numbered as in the layout.

    Attributes
    ----------
    order : tuple of int
        The axes from the outermost in memory to the innermost; () for the order of the shape.
    gaps : tuple of int
        Free elements between two steps along each axis; () for none. A gap on the innermost axis
        gives a last stride that is not 1.
    offset : int
        Elements before the tensor.
    flipped, broadcast : tuple of int
        Axes with a negative stride, and axes of stride 0.
    absurd : bool
        Whether axes of one element get an impossible stride.
    """

    order: tuple[int, ...] = ()
    gaps: tuple[int, ...] = ()
    offset: int = 0
    flipped: tuple[int, ...] = ()
    broadcast: tuple[int, ...] = ()
    absurd: bool = False

    def place(self, shape: Sequence[int]) -> Placement:
        """Strides, start and extent of a tensor of this shape."""
        strides, start, step = [0] * len(shape), self.offset, 1
        last = 0
        for axis in reversed(self.order or range(len(shape))):
            size = shape[axis]
            if size == 1 and self.absurd:
                strides[axis] = ABSURD
            if axis in self.broadcast or (size == 1 and self.absurd):
                continue
            step += self.gaps[axis] if self.gaps else 0
            span = step * max(size - 1, 0)
            strides[axis], last = step, last + span
            if axis in self.flipped:
                strides[axis], start = -step, start + span
            step *= max(size, 1)
        extent = self.offset + (last + 1 if all(shape) else 0)
        return Placement(tuple(shape), tuple(strides), start, extent)

    def __str__(self) -> str:
        parts = {
            "o": "".join(map(str, self.order)),
            "g": ".".join(map(str, self.gaps)),
            "a": str(self.offset or ""),
            "f": "".join(map(str, self.flipped)),
            "b": "".join(map(str, self.broadcast)),
            "x": "1" if self.absurd else "",
        }
        return ",".join(key + value for key, value in parts.items() if value) or "c"

    @classmethod
    def parse(cls, text: str) -> Strides:
        """The recipe that prints as ``text``."""
        if text == "c":
            return CONTIGUOUS
        parts = {part[0]: part[1:] for part in text.split(",")}
        if not parts.keys() <= set("ogafbx"):
            raise ValueError(f"not a recipe of strides: {text!r}")

        def axes(key: str) -> tuple[int, ...]:
            return tuple(map(int, parts.get(key, "")))

        return cls(
            order=axes("o"),
            gaps=tuple(map(int, re.findall(r"\d+", parts.get("g", "")))),
            offset=int(parts.get("a", 0)),
            flipped=axes("f"),
            broadcast=axes("b"),
            absurd="x" in parts,
        )


CONTIGUOUS = Strides()


def boxed(shape: Sequence[int], itemsize: int) -> Strides:
    """Rows at multiples of 16 bytes, as the copy engine needs for boxes."""
    if len(shape) < 2:
        return CONTIGUOUS
    gaps = [0] * len(shape)
    gaps[-2] = -shape[-1] % (16 // itemsize)
    return Strides(gaps=tuple(gaps))


def strided_view(flat: Any, placement: Placement, xp: Any = np) -> Any:
    """The tensor of a placement in a one-dimensional array that covers its extent."""
    itemsize = flat.dtype.itemsize
    return xp.lib.stride_tricks.as_strided(
        flat[placement.start :],
        placement.shape,
        tuple(stride * itemsize for stride in placement.strides),
    )


def any_recipe(axes: int, seed: int) -> Strides:
    """Contiguous for half of the seeds; for the others anything that addresses can express."""
    random = np.random.default_rng([seed, 77])
    if random.integers(2):
        return CONTIGUOUS
    return Strides(
        order=tuple(int(axis) for axis in random.permutation(axes)),
        gaps=tuple(int(gap) for gap in random.choice([0, 0, 1, 8], axes)),
        offset=int(random.choice([0, 1, 8])),
        flipped=tuple(axis for axis in range(axes) if random.integers(4) == 0),
        absurd=bool(random.integers(2)),
    )

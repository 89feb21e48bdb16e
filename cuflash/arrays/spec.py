"""Descriptions of arrays, and the layouts of calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

__all__ = ["LAYOUTS", "Layout", "LayoutName", "TensorSpec", "contiguous_strides", "default_layout"]

#: The axes with which the kernels and the tiled NumPy code work.
CANONICAL = "bshd"

LayoutName = Literal["bshd", "bhsd", "shd", "hsd", "sd"]


@dataclass(frozen=True)
class Layout:
    """The order of a call's axes: batch, sequence, head, dimension."""

    name: LayoutName

    def shape(self, batch: int, seqlen: int, heads: int, head_dim: int) -> tuple[int, ...]:
        """The shape of a tensor with these sizes."""
        sizes = dict(zip(CANONICAL, (batch, seqlen, heads, head_dim), strict=True))
        return tuple(sizes[axis] for axis in self.name)

    def rows_shape(self, batch: int, heads: int, seqlen: int) -> tuple[int, ...]:
        """The shape of one number for each row: (batch, heads, seqlen) without absent axes."""
        sizes = {"b": batch, "h": heads, "s": seqlen}
        return tuple(size for axis, size in sizes.items() if axis in self.name)

    def canonical(self, values: Sequence[int], absent: int) -> tuple[int, int, int, int]:
        """Values of the axes reordered to batch, sequence, head, dimension."""
        found = dict(zip(self.name, values, strict=True))
        batch, seqlen, head, dim = (found.get(axis, absent) for axis in CANONICAL)
        return batch, seqlen, head, dim

    def canonical_rows(self, values: Sequence[int], absent: int) -> tuple[int, int, int]:
        """Values of the axes of one number per row, reordered to batch, row, head."""
        found = dict(zip((a for a in "bhs" if a in self.name), values, strict=True))
        return found.get("b", absent), found.get("s", absent), found.get("h", absent)


#: The layouts by name. Four axes default to "bshd"; three must be named.
LAYOUTS: dict[str, Layout] = {name: Layout(name) for name in get_args(LayoutName)}


def default_layout(ndim: int) -> Layout | None:
    """The default layout for this number of axes; None if the layout must be given."""
    return {4: LAYOUTS["bshd"], 2: LAYOUTS["sd"]}.get(ndim)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a C-contiguous array."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


@dataclass(frozen=True)
class TensorSpec:
    """The description of an array without its contents.

    ``strides`` are in elements; None if they are not whole elements. ``device`` is None for host
    memory. ``offset`` is the address modulo 16.
    """

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None
    itemsize: int
    device: int | None = None
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """The size of its elements in bytes."""
        return math.prod(self.shape) * self.itemsize

    @property
    def whole_elements(self) -> bool:
        """Whether every element's address is a multiple of its size."""
        return self.strides is not None and self.offset % self.itemsize == 0

    @property
    def is_contiguous(self) -> bool:
        """Whether it is C-contiguous; strides of axes of one element do not matter."""
        if self.strides is None or 0 in self.shape:
            return self.strides is not None
        pairs = zip(self.shape, self.strides, contiguous_strides(self.shape), strict=True)
        return all(size == 1 or stride == wanted for size, stride, wanted in pairs)

    @property
    def rows_are_unit(self) -> bool:
        """Whether the last axis is consecutive elements."""
        if self.strides is None:
            return False
        return not self.shape or self.shape[-1] <= 1 or self.strides[-1] == 1

    @property
    def aligned(self) -> bool:
        """Whether every row starts at a multiple of 16 bytes and is a multiple of 16 bytes long."""
        if self.strides is None or (self.offset % 16 and 0 not in self.shape):
            return False
        sizes = [self.shape[-1], *self._outer_strides()]
        return all(size * self.itemsize % 16 == 0 for size in sizes)

    @property
    def mappable(self) -> bool:
        """Whether Hopper's copy engine can read it: aligned, strides positive, below 2^40 bytes.

        CUDA Driver API, cuTensorMapEncodeTiled.
        """
        strides = self._outer_strides()
        return self.aligned and all(0 < stride * self.itemsize < 1 << 40 for stride in strides)

    @property
    def boxable(self) -> bool:
        """Whether the copy engine can read it with rows of any length: it stops at a row's end."""
        if not self.rows_are_unit or (self.offset % 16 and 0 not in self.shape):
            return False
        sizes = [stride * self.itemsize for stride in self._outer_strides()]
        return all(size % 16 == 0 and 0 < size < 1 << 40 for size in sizes)

    def _outer_strides(self) -> list[int]:
        if 0 in self.shape:  # no elements, so no rows
            return []
        pairs = zip(self.shape[:-1], self.strides or (), strict=False)
        return [stride for size, stride in pairs if size > 1]

    def contiguous(self) -> TensorSpec:
        """The same array in fresh C-contiguous memory of the same device."""
        return replace(self, strides=contiguous_strides(self.shape), offset=0)

    def on_device(self, device: int) -> TensorSpec:
        """A fresh C-contiguous copy on a CUDA device."""
        return replace(self.contiguous(), device=device)

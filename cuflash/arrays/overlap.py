"""Whether arrays share memory, decided from addresses and strides; no memory is read."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .adopt import address
from .mapped import Mappings
from .sums import can_reach

__all__ = ["overlaps_itself", "share_memory"]


class _Extent(NamedTuple):
    """The bytes of an array that has elements.

    Attributes
    ----------
    first
        The address of its lowest byte.
    reach
        Bytes from its lowest to its highest element.
    axes
        ``(step, most)`` of every axis of more than one index: the bytes between two indices, as a
        positive number, and the largest index.
    itemsize
        The size of an element in bytes.
    """

    first: int
    reach: int
    axes: list[tuple[int, int]]
    itemsize: int


def _extent(array: Any) -> _Extent:
    first, reach, axes = address(array), 0, []
    for size, stride in zip(array.shape, array.strides, strict=True):
        if size > 1:
            axes.append((abs(stride), size - 1))
            reach += abs(stride) * (size - 1)
            first += min(stride, 0) * (size - 1)
    return _Extent(first, reach, axes, array.dtype.itemsize)


def share_memory(a: Any, b: Any, mappings: Mappings | None = None) -> bool:
    """Whether two native arrays have a byte in common.

    The answer is exact for arrays in the same address space, even interleaved ones, as far as
    :func:`can_reach` is exact. Host arrays in different mappings of one file share its bytes
    (:class:`Mappings`); two mappings of one allocation of CUDA memory go unnoticed.

    Parameters
    ----------
    a, b
        NumPy or CuPy arrays. A host array and a device array never share memory.
    mappings
        The mappings of the process, to reuse for several pairs.
    """
    if 0 in (a.size, b.size) or isinstance(a, np.ndarray) != isinstance(b, np.ndarray):
        return False
    first, second = _extent(a), _extent(b)
    if _meet(first, second):
        return True
    if not isinstance(a, np.ndarray):
        return False
    places = (mappings or Mappings()).same_file(a, first.first, b, second.first)
    if places is None:
        return False
    return _meet(first._replace(first=places[0]), second._replace(first=places[1]))


def _meet(a: _Extent, b: _Extent) -> bool:
    """Whether the extents have a byte in common."""
    # With the axes of b counted from their ends, an element of a lies
    #     a.first - (b.first + b.reach) + sum of all steps
    # beyond one of b. They meet if this distance is above -a.itemsize and below b.itemsize.
    start = b.first + b.reach - a.first
    if start <= -b.itemsize or start - a.itemsize >= a.reach + b.reach:
        return False  # one ends before the other begins
    return can_reach((*a.axes, *b.axes), start - a.itemsize + 1, start + b.itemsize - 1)


def overlaps_itself(array: Any) -> bool:
    """Whether two elements of an array share a byte, as in a broadcast view.

    The answer is exact as far as :func:`can_reach` is.
    """
    if array.size == 0:
        return False
    extent = _extent(array)
    axes = sorted(extent.axes)
    for position, (step, most) in enumerate(axes):
        # Of the axes along which two elements differ, let this one have the longest step. They are
        # 1 to ``most`` steps apart along it, and -``most`` to ``most`` steps along each axis before
        # it. The latter are counted from -``most``, so that no count is negative.
        shorter = [(s, 2 * n) for s, n in axes[:position]]
        start = sum(s * n for s, n in axes[:position]) - step
        near = extent.itemsize - 1
        if can_reach([(step, most - 1), *shorter], start - near, start + near):
            return True
    return False

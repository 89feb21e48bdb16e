"""Whether memory is shared: exact where it can be decided quickly, else assumed."""

from __future__ import annotations

from typing import Any

import numpy as np

from .adopt import address

__all__ = ["overlaps_itself", "share_memory"]

# Steps of NumPy's exact solver; beyond them an overlap is assumed.
_WORK = 10_000


class _Extent:
    """An array's address, shape and strides as NumPy reads them; its memory is never touched."""

    def __init__(self, array: Any) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address(array), True),
            "shape": tuple(array.shape),
            "strides": tuple(array.strides),
            "typestr": f"|V{array.dtype.itemsize}",
        }


def share_memory(a: Any, b: Any) -> bool:
    """Whether some element of one native array lies in an element of the other."""
    if 0 in (a.size, b.size) or isinstance(a, np.ndarray) != isinstance(b, np.ndarray):
        return False
    first, second = np.asarray(_Extent(a)), np.asarray(_Extent(b))
    if not np.may_share_memory(first, second):
        return False
    try:
        return bool(np.shares_memory(first, second, max_work=_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(array: Any) -> bool:
    """Whether two elements of an array may share memory, as in a broadcast view.

    False is certain; True is not. What NumPy makes by slicing, transposing or
    broadcasting is told exactly, but strides that interleave without meeting,
    such as 2 and 3 elements over axes of 3 and 2, are taken for an overlap.
    """
    axes = sorted(
        (abs(stride), size)
        for size, stride in zip(array.shape, array.strides, strict=True)
        if size > 1
    )
    reach = array.dtype.itemsize
    for stride, size in axes:
        if stride < reach:
            return bool(array.size > 0)
        reach += stride * (size - 1)
    return False

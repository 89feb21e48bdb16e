"""Arrays that broadcast against all pairs of a query and a key, as features read them."""

from __future__ import annotations

from typing import Any

import numpy as np

from .feature import Axis
from .host import ScorePlace
from .use import Operand

__all__ = ["AXES", "block_of", "numbers_of", "part_of"]

AXES: tuple[Axis, ...] = ("batch", "heads_q", "seqlen_q", "seqlen_kv")
_STRIDES = ("batch_stride", "head_stride", "row_stride", "column_stride")


def block_of(name: str) -> list[tuple[str, type]]:
    """Fields of a device block for an array that kernels read in place."""
    strides = ((f"{name}_{stride}", np.int64) for stride in _STRIDES)
    return [(name, np.uint64), *strides, ("entries", np.int32), ("own_entries", np.int32)]


def numbers_of(array: Operand) -> tuple[tuple[str, int], ...]:
    """Values of the device block's fields that map batch entries and heads to the array's own."""
    own, heads, _, _ = array.pairs
    entries = 1 if array.entries is None else array.entries[0]
    return ("entries", entries), ("own_entries", max(1, own)), ("own_heads", heads)


def part_of(array: Any, place: ScorePlace, entries: int = 1) -> Any:
    """The part of an array that a tile needs.

    Its axes are (batch, kv head, key, head of the group, query), each its full size or 1. It is a
    view unless ``entries`` neighbouring batch entries share one of the array's.
    """
    whole = array.reshape((1,) * (len(AXES) - array.ndim) + array.shape)
    _, of_keys, _, group, _ = place.head.shape
    split = (1, 1)
    if whole.shape[1] > 1:
        first = place.head.flat[0]
        whole = whole[:, first : first + of_keys * group]
        split = (of_keys, group)
    own = place.batch.ravel() // entries % whole.shape[0]
    if whole.shape[0] > 1:
        in_order = np.array_equal(own, np.arange(own[0], own[0] + own.size))
        whole = whole[own[0] : own[-1] + 1] if in_order else whole[own]
    for axis, index in ((2, place.i.ravel()), (3, place.j.ravel())):
        if whole.shape[axis] > 1:
            whole = whole[(slice(None),) * axis + (slice(index[0], index[-1] + 1),)]
    batch, _, rows, keys = whole.shape
    return whole.reshape(batch, *split, rows, keys).transpose(0, 1, 4, 2, 3)

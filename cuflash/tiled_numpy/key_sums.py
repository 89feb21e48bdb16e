"""dK and dV of some heads: sums over the parts of the queries, which threads compute."""

from __future__ import annotations

import threading
from typing import TypeAlias

import numpy as np

from .blocks import Array
from .heads import Heads
from .operands import Operands

__all__ = ["KeySums"]

#: dK and dV; None for an unwanted one.
Sums: TypeAlias = tuple[Array | None, Array | None]


class KeySums:
    """Adds the parts' contributions in a fixed order, and writes each block once.

    The bits therefore do not depend on which part finishes first. Parts begin in order, so few
    contributions wait for an earlier one.
    """

    def __init__(
        self, heads: Heads, keys: list[slice], parts: int, dk: Array | None, dv: Array | None
    ) -> None:
        self._heads, self._keys = heads, keys
        self._parts = parts
        self._into = dk, dv
        self._lock = threading.Lock()
        self._next = [0] * len(keys)
        self._totals: dict[int, Sums] = {}
        self._waiting: dict[tuple[int, int], Sums] = {}

    def start(self, operands: Operands, block: slice) -> Sums:
        """Zeros for dK and dV of a block of keys, (batch, head, key, width) each."""
        length = block.stop - block.start
        made = [
            None
            if array is None
            else np.zeros((*rows.shape[:2], length, rows.shape[3]), rows.dtype)
            for array, rows in zip(self._into, (operands.keys, operands.values), strict=True)
        ]
        return made[0], made[1]

    def add(self, part: int, block: int, given: Sums) -> None:
        """Take over a part's contribution to a block of keys."""
        with self._lock:
            self._waiting[part, block] = given
            while (ready := self._waiting.pop((self._next[block], block), None)) is not None:
                self._next[block] += 1
                if block in self._totals:
                    for total, more in zip(self._totals[block], ready, strict=True):
                        if total is not None and more is not None:
                            total += more
                else:
                    self._totals[block] = ready
                if self._next[block] == self._parts:
                    self._write(block)

    def _write(self, block: int) -> None:
        for array, total in zip(self._into, self._totals.pop(block), strict=True):
            if array is not None and total is not None:
                self._heads.set_keys(array, self._keys[block], total)

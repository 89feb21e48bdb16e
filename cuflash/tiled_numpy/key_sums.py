"""dK and dV of some heads: sums over the parts of the queries, which threads compute."""

from __future__ import annotations

import threading

from .blocks import Array
from .heads import Heads

__all__ = ["KeySums"]


class KeySums:
    """Adds what the parts give, always in the same order, and writes each block once.

    So the bits do not depend on which part is done first. Parts begin in
    their order, so only a few wait for an earlier one.
    """

    def __init__(self, heads: Heads, keys: list[slice], parts: int, dk: Array, dv: Array) -> None:
        self._heads, self._keys = heads, keys
        self._parts = parts
        self._dk, self._dv = dk, dv
        self._lock = threading.Lock()
        self._next = [0] * len(keys)
        self._totals: dict[int, tuple[Array, Array]] = {}
        self._waiting: dict[tuple[int, int], tuple[Array, Array]] = {}

    def add(self, part: int, block: int, dk: Array, dv: Array) -> None:
        """Take over what a part gives to a block of keys: (batch, head, key, width) each."""
        with self._lock:
            self._waiting[part, block] = dk, dv
            while (ready := self._waiting.pop((self._next[block], block), None)) is not None:
                self._next[block] += 1
                if block in self._totals:
                    for total, more in zip(self._totals[block], ready, strict=True):
                        total += more
                else:
                    self._totals[block] = ready
                if self._next[block] == self._parts:
                    self._write(block)

    def _write(self, block: int) -> None:
        dk, dv = self._totals.pop(block)
        self._heads.set_keys(self._dk, self._keys[block], dk)
        self._heads.set_keys(self._dv, self._keys[block], dv)

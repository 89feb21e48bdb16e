"""Keys and values of some heads, shared by the tasks that compute with them."""

from __future__ import annotations

import threading

import numpy as np

from .blocks import Array, Blocks
from .common_part import common_part
from .heads import Heads

__all__ = ["Operands"]

#: With fewer rows the common part of the keys costs more to take off than the products.
#: The backward pass always takes it off, since it has to.
_FEW_ROWS = 16


class Operands:
    """Made by the first task that asks, while the others wait for it.

    Attributes
    ----------
    keys, values
        (batch, head, key, width) as BLAS reads them, in the compute dtype.
        Keys are without their common part.
    common
        That part, (batch, head, 1, width), or None.
    """

    keys: Array
    values: Array
    common: Array | None

    def __init__(self, blocks: Blocks, heads: Heads, q: Array, k: Array, v: Array) -> None:
        self._blocks, self._heads = blocks, heads
        self._given = q, k, v
        self._lock = threading.Lock()
        self._made = False

    def make(self) -> Operands:
        """Have everything there; returns itself."""
        with self._lock:
            if not self._made:
                self._make(*self._given)
                self._made = True
        return self

    def _make(self, q: Array, k: Array, v: Array) -> None:
        problem = self._blocks.problem
        self.keys, self.values = self._heads.keys(k), self._heads.keys(v)
        self.common = None
        rows = problem.group * problem.seqlen_q
        if problem.operation == "backward" or rows >= _FEW_ROWS:
            self.common = common_part(self.keys, self._blocks.seen_keys)
        if self.common is not None and not self._heads.finite(q):
            self.common = None  # an infinity times a key keeps its sign
        if self.common is not None:
            self.keys = np.subtract(self.keys, self.common)

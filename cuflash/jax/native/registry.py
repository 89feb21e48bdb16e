"""Launch tables by numbers that are the same in every process.

A compiled computation holds the number of its table and no address. So JAX's
compilation cache may keep it on disk: a process that loads it from there has
lowered the same call before, and has its own table under that number.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import UnsupportedError

__all__ = ["NO_TABLE", "SLOTS", "SLOT_BYTES", "Registry", "as_text"]

#: Pairs of a number and the address of its table.
SLOTS, SLOT_BYTES = 1 << 16, 16
#: Index of the word after the pairs: the address of the message for a number without a table.
NO_TABLE = 0

_MISSING = (
    "cuflash: this computation was compiled in another process, whose launch table is not here; "
    "lower and compile it in this one"
)


def as_text(text: bytes) -> npt.NDArray[np.uint8]:
    """Return a text as a C string, padded with zeros to whole words."""
    return np.frombuffer(text + bytes(8 - len(text) % 8), np.uint8)


class Registry:
    """Tables by their numbers. No table is ever removed: a computation may run at any time."""

    def __init__(self) -> None:
        self._words = np.zeros(2 * SLOTS + NO_TABLE + 1, np.int64)
        self._missing = as_text(_MISSING.encode())
        self._words[2 * SLOTS + NO_TABLE] = self._missing.ctypes.data
        self._tables: dict[int, Any] = {}
        self._lock = threading.Lock()

    @property
    def address(self) -> int:
        """Address of the first pair."""
        return int(self._words.ctypes.data)

    def __contains__(self, number: int) -> bool:
        return number in self._tables

    def add(self, number: int, address: int, kept: Any) -> None:
        """Put a table under a number, if it has none; ``kept`` lives as long as the process.

        Raises
        ------
        UnsupportedError
            If the registry is full.
        """
        with self._lock:
            if number in self._tables:
                return
            if len(self._tables) >= SLOTS // 2:
                raise UnsupportedError(f"more than {SLOTS // 2} different calls in one process")
            slot = number % SLOTS
            while self._words[2 * slot]:
                slot = (slot + 1) % SLOTS
            self._words[2 * slot + 1] = address
            self._words[2 * slot] = number  # last: the handler reads without the lock
            self._tables[number] = kept

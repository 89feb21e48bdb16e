"""A dictionary that is emptied before it grows beyond a bound."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["BoundedCache"]

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """At most ``most`` items: a full cache forgets all of them before it takes another one.

    A look-up is as fast as in a plain dictionary. Threads may look up, with ``get``, and store at
    the same time.

    Parameters
    ----------
    most
        The number of items that are kept, at least 1.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.most and key not in self:
            self.clear()
        super().__setitem__(key, value)

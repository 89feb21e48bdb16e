"""Plans of forward passes with the tiles of their table, however few tiles there are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from cuflash import calls
from cuflash.planning import fa3_choice

__all__ = ["filled"]


@contextmanager
def filled() -> Iterator[None]:
    """Plan as if every problem filled the device: small problems then test large ones' tiles."""
    with mock.patch.object(fa3_choice, "is_small", return_value=False):
        calls.forget()
        yield
    calls.forget()

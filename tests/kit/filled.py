"""Plans with the tiles of large problems, however few tiles there are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from cuflash import calls
from cuflash.planning import fa3_choice
from cuflash.planning.tiles import fa3_lengths

__all__ = ["filled"]


@contextmanager
def filled() -> Iterator[None]:
    """Plan as if every problem filled the device: small problems then test large ones' tiles.

    Gradients of few queries have the tiles that keep keys; :mod:`tests.kit.few` has the others.
    """
    with (
        mock.patch.object(fa3_choice, "is_small", return_value=False),
        mock.patch.object(fa3_lengths, "is_fastest", return_value=False),
    ):
        calls.forget()
        yield
    calls.forget()

"""FlashAttention-3's backward pass with the tile for few queries alone, and with other tiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from cuflash import calls
from cuflash.planning.tiles import fa3, fa3_few
from cuflash.planning.tiles.fa3_tables import BackwardRow

__all__ = ["any_lengths", "few_alone"]


@contextmanager
def any_lengths() -> Iterator[None]:
    """Plans of a backward pass have the tiles that take all lengths, not those of some."""
    with (
        mock.patch.object(fa3_few, "is_fastest", return_value=False),
        mock.patch.object(BackwardRow, "takes", lambda row, _: not row.lengths[1]),
    ):
        calls.forget()
        yield
    calls.forget()


@contextmanager
def few_alone() -> Iterator[None]:
    """Plans of a backward pass have no other tile of fa3 to choose from."""
    with mock.patch.object(fa3, "_over_queries", return_value=()):
        calls.forget()
        yield
    calls.forget()

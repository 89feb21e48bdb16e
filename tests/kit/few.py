"""FlashAttention-3's backward pass with one of its kinds of tiles alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from cuflash import calls
from cuflash.planning.tiles import fa3, fa3_lengths
from cuflash.planning.tiles.fa3_tables import BackwardRow

__all__ = ["any_lengths", "few_alone", "short_alone"]


@contextmanager
def any_lengths() -> Iterator[None]:
    """Plans of a backward pass have only tiles that take all lengths."""
    with (
        mock.patch.object(fa3_lengths, "is_fastest", return_value=False),
        mock.patch.object(BackwardRow, "takes", lambda row, _: not row.lengths[1]),
    ):
        calls.forget()
        yield
    calls.forget()


@contextmanager
def few_alone() -> Iterator[None]:
    """Plans of a backward pass have no tile of fa3 but the one for few queries."""
    with _without("short_tiles"):
        yield


@contextmanager
def short_alone() -> Iterator[None]:
    """Plans of a backward pass have no tile of fa3 but the one for short heads."""
    with _without("few_tiles"):
        yield


@contextmanager
def _without(tiles: str) -> Iterator[None]:
    """Plans have neither these tiles nor those that keep keys."""
    with (
        mock.patch.object(fa3, "_over_queries", return_value=()),
        mock.patch.object(fa3_lengths, tiles, return_value=()),
    ):
        calls.forget()
        yield
    calls.forget()

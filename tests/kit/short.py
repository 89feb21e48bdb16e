"""FlashAttention-3's backward pass with the tile for short heads alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from cuflash import calls
from cuflash.planning.tiles import fa3

__all__ = ["short_alone"]


@contextmanager
def short_alone() -> Iterator[None]:
    """Plans of a backward pass have no other tile of fa3 to choose from."""
    with (
        mock.patch.object(fa3, "_over_queries", return_value=()),
        mock.patch.object(fa3, "few_tiles", return_value=()),
    ):
        calls.forget()
        yield
    calls.forget()

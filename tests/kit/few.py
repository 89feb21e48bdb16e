"""FlashAttention-3's backward pass with the tile for few queries alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from cuflash import calls
from cuflash.planning.tiles import fa3

__all__ = ["few_alone"]


@contextmanager
def few_alone() -> Iterator[None]:
    """Plans of a backward pass have no other tile of fa3 to choose from."""
    with mock.patch.object(fa3, "_over_queries", return_value=()):
        calls.forget()
        yield
    calls.forget()

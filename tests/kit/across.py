"""FlashAttention-3's backward pass with tiles of queries x keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from cuflash import calls
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles import fa3
from cuflash.planning.tiles.fa3 import Fa3BackwardTile

__all__ = ["across_alone", "across_tile"]


def across_tile(problem: AttentionProblem) -> Fa3BackwardTile:
    """Return the tile of queries x keys for the order of a backward pass."""
    return Fa3BackwardTile(64, 96, 2, 192, 192, problem.deterministic, zero_bytes=1024)


@contextmanager
def across_alone() -> Iterator[None]:
    """Plans of a backward pass have no tile of fa3 but the one of queries x keys."""
    with mock.patch.object(fa3, "_backward", lambda problem, *_: (across_tile(problem),)):
        calls.forget()
        yield
    calls.forget()

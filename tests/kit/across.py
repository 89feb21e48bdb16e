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
    """Return the tile of queries x keys for the widths and the order of a backward pass."""
    wide = max(problem.head_dim, problem.head_dim_v) > 192
    width = 256 if wide else 192
    tile = Fa3BackwardTile(64, 80 if wide else 96, 2, width, width, problem.deterministic, zero_bytes=1024)
    return tile


@contextmanager
def across_alone() -> Iterator[None]:
    """Plans of a backward pass have no tile of fa3 but the one of queries x keys."""
    with mock.patch.object(fa3, "_backward", lambda problem, *_: (across_tile(problem),)):
        calls.forget()
        yield
    calls.forget()

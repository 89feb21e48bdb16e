"""FlashAttention-3's backward pass with tiles of queries x keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from cuflash import calls
from cuflash.planning.device import DeviceLimits
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles import fa3

__all__ = ["across_alone"]


@contextmanager
def across_alone() -> Iterator[None]:
    """Plans of a backward pass have the tile of queries x keys where one width is narrow too."""
    original = fa3._over_queries

    def asked(problem: AttentionProblem, limits: DeviceLimits, _: bool) -> Iterator[fa3.Fa3Tile]:
        yield from (tile for tile in original(problem, True) if tile.block_kv % fa3.ROWS)

    with mock.patch.object(fa3, "_backward", asked):
        calls.forget()
        yield
    calls.forget()

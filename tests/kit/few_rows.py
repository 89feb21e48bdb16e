"""FlashAttention-2's forward pass for few queries: its tile withheld, or its chunks forced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from cuflash import calls
from cuflash.planning import fa2, invariant
from cuflash.planning.device import DeviceLimits
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles.fa2_few import Fa2FewTile, merging_tile

__all__ = ["WAYS", "few_rows", "without_few_rows"]

#: How a pass over caches is divided: a block for each chunk, or one that merges chunks.
WAYS = "split", "merging"


@contextmanager
def without_few_rows() -> Iterator[None]:
    """Plans have no tile for few queries."""
    with mock.patch.object(fa2, "few_tile", return_value=None):
        calls.forget()
        yield
    calls.forget()


@contextmanager
def few_rows(way: str, chunk: int | None = None) -> Iterator[None]:
    """Passes over caches are divided in one way, into chunks of so many keys."""

    def merging(
        problem: AttentionProblem, limits: DeviceLimits, tile: Fa2FewTile, keys: int
    ) -> Fa2FewTile | None:
        del problem
        return merging_tile(tile, limits, keys) if way == "merging" and keys else None

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(invariant, "in_one_block", merging))
        if chunk is not None:
            steady = mock.patch.object(invariant, "steadiest_chunk", return_value=chunk)
            stack.enter_context(steady)
        invariant._choice.cache_clear()
        calls.forget()
        yield
    invariant._choice.cache_clear()
    calls.forget()

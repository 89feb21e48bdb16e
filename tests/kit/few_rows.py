"""FlashAttention-2's forward pass for few queries: its tile withheld, or its way forced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

from cuflash import calls
from cuflash.planning import fa2, invariant
from cuflash.planning.device import DeviceLimits
from cuflash.planning.fa2_few import Way, fastest_way
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles.fa2_few import Fa2FewTile, merging_tile

__all__ = ["WAYS", "few_rows", "of_its_bits", "without_few_rows"]

#: How a pass is divided: a block for each chunk, one that merges chunks, or such a one with the
#: fewest rows and with even loads.
WAYS = "split", "merging", "fewest rows"


def of_its_bits(tile: Fa2FewTile) -> Fa2FewTile:
    """The tile without what changes no bit: a block's rows, and where chunks are merged."""
    return replace(tile, rows=0, heads=0, result_rows=0, num_slots=0, chunk=0)


@contextmanager
def without_few_rows() -> Iterator[None]:
    """Plans have no tile for few queries."""
    with mock.patch.object(fa2, "few_tiles", return_value=()):
        calls.forget()
        yield
    calls.forget()


@contextmanager
def few_rows(way: str, chunk: int | None = None) -> Iterator[None]:
    """Passes are divided in one way, into chunks of so many keys."""

    def forced(
        problem: AttentionProblem,
        limits: DeviceLimits,
        tiles: Sequence[Fa2FewTile],
        asked: int | None = None,
    ) -> Way:
        planned, keys = fastest_way(problem, limits, tiles, chunk if asked is None else asked)
        keys = keys or planned.chunk
        fewest = way == "fewest rows"
        tile = tiles[-1] if fewest else tiles[0]
        merging = merging_tile(tile, limits, keys) if way != "split" and keys else None
        taken, keys = (tile, keys) if merging is None else (merging, 0)
        return taken.with_even_loads() if fewest else taken, keys

    with ExitStack() as stack:
        for module in (fa2, invariant):
            stack.enter_context(mock.patch.object(module, "fastest_way", forced))
        if chunk is not None:
            steady = mock.patch.object(invariant, "steadiest_chunk", return_value=chunk)
            stack.enter_context(steady)
        invariant._choice.cache_clear()
        calls.forget()
        yield
    invariant._choice.cache_clear()
    calls.forget()

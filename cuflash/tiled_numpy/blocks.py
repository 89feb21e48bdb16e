"""The order of a problem's work: blocks of rows, the tiles that the mask leaves, scratch."""

from __future__ import annotations

import copy
import functools
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentTypeError
from ..planning.plan import Plan
from ..planning.tiles.host import HostTile

__all__ = ["Array", "Blocks", "Scratch", "Tile", "tile_of"]

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class Tile:
    """A block of queries, and the keys of a block that any of these queries sees."""

    queries: slice
    keys: slice
    rows: slice  # the queries among the folded rows
    first: bool  # no earlier block of keys has a tile of these queries


class Blocks:
    """The blocks of a plan and their tiles, in the order of either loop.

    Blocks whose tasks run on the same threads in turn may share their scratch memory.
    """

    def __init__(self, plan: Plan, others: Blocks | None = None) -> None:
        self.problem = plan.problem
        self.tile = tile_of(plan)
        self.compute = np.dtype(plan.problem.compute)
        self.queries = _slices(plan.problem.seqlen_q, self.tile.block_q)
        self.first_query = 0
        self.keys = _slices(plan.problem.seqlen_kv, self.tile.block_kv)
        self._sees = plan.problem.visibility
        steps = functools.partial(_staircase, self.tile.block_q, self.compute)
        self._until = None if self._sees.last is None else steps(hidden_from_earlier=True)
        self._from = None if self._sees.first is None else steps(hidden_from_earlier=False)
        shared = threading.local() if others is None else others._of_thread
        self._of_thread: threading.local = shared

    @property
    def scratch(self) -> Scratch:
        """Memory that the tasks of one thread use in turn."""
        found: Scratch | None = getattr(self._of_thread, "scratch", None)
        if found is None:
            found = self._of_thread.scratch = Scratch(self.compute)
        return found

    @property
    def seen_keys(self) -> slice:
        """The keys that some query sees."""
        return self._keys_seen(slice(0, self.problem.seqlen_q))

    @property
    def live_queries(self) -> slice:
        """The queries that see a key; those before and after are dead rows."""
        keys = self.seen_keys
        if keys.start == keys.stop:
            return slice(0, 0)
        return slice(*self._sees.queries_seeing(0, self.problem.seqlen_kv))

    def live(self, q: Array) -> Array:
        """Queries (batch, seqlen, head, width) with zeros in rows that see no key.

        These rows affect no result. It is a copy only if there are such rows.
        """
        live = self.live_queries
        if live.stop - live.start == self.problem.seqlen_q:
            return q
        q = q.copy()
        q[:, : live.start] = 0
        q[:, live.stop :] = 0
        return q

    def parts(self, wanted: int | None = None) -> list[Blocks]:
        """The blocks of queries in runs with disjoint rows; the plan says how many runs.

        ``wanted`` overrides that number, as far as there are enough blocks.
        """
        count = len(self.queries)
        wanted = max(1, min(self.tile.parts if wanted is None else wanted, count))
        found = []
        for index in range(wanted):
            part = copy.copy(self)
            part.queries = self.queries[index * count // wanted : (index + 1) * count // wanted]
            part.first_query = part.queries[0].start if part.queries else 0
            found.append(part)
        return found

    def rows(self, queries: slice) -> slice:
        """The rows of a block of queries among the folded rows of these blocks."""
        group, first = self.problem.group, self.first_query
        return slice(group * (queries.start - first), group * (queries.stop - first))

    def of_queries(self, queries: slice) -> Iterator[Tile]:
        """The tiles of a block of queries, over the keys: FlashAttention-2's inner loop."""
        seen, length = self._keys_seen(queries), self.tile.block_kv
        for block in self.keys[seen.start // length : -(-seen.stop // length)]:
            yield self._tile(queries, block, seen)

    def of_keys(self, keys: slice) -> Iterator[Tile]:
        """The tiles of a block of keys, over the queries: FlashAttention-1's inner loop."""
        for queries in self.queries:
            seen = self._keys_seen(queries)
            if seen.start < keys.stop and keys.start < seen.stop:
                yield self._tile(queries, keys, seen)

    def apply_mask(self, scores: Array, tile: Tile) -> None:
        """Set hidden pairs to minus infinity; keys that every query sees are not touched.

        Scores are (batch, head, key, row). A visible NaN may become plus infinity, which also makes
        its row NaN.
        """
        first, last = self._sees.first, self._sees.last
        if self._until is not None and last is not None:
            # The keys from the first one that the first query no longer sees.
            self._limit(scores, tile, self._until, tile.queries.start + last + 1, tile.keys.stop)
        if self._from is not None and first is not None:
            # The keys from the first one that the first query sees, up to that of the last query.
            stop = min(tile.keys.stop, tile.queries.stop - 1 + first)
            self._limit(scores, tile, self._from, tile.queries.start + first, stop)

    def _limit(self, scores: Array, tile: Tile, steps: Array, key_of_step: int, stop: int) -> None:
        """Apply a staircase with steps of one key to the tile's keys before ``stop``."""
        start = max(key_of_step, tile.keys.start)
        if start >= stop:
            return
        length = tile.queries.stop - tile.queries.start
        limit = steps[start - key_of_step : stop - key_of_step, :length]
        edge = scores[:, :, start - tile.keys.start : stop - tile.keys.start]
        edge = edge.reshape(*edge.shape[:3], self.problem.group, length)
        np.fmin(edge, limit[:, None], out=edge)

    def _keys_seen(self, queries: slice) -> slice:
        """The keys that some query of a block sees; an empty range at 0 if there are none."""
        first, last = self._sees.first, self._sees.last
        if first is not None and last is not None and first > last:
            return slice(0, 0)
        return slice(*self._sees.keys_seen(queries.start, queries.stop))

    def _tile(self, queries: slice, block: slice, seen: slice) -> Tile:
        keys = slice(max(block.start, seen.start), min(block.stop, seen.stop))
        return Tile(queries, keys, self.rows(queries), keys.start == seen.start)


class Scratch:
    """Memory that tiles use in turn."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._buffers: dict[str, Array] = {}

    def array(self, name: str, shape: tuple[int, ...]) -> Array:
        """A contiguous, uninitialised array, valid until the next call with the same name."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            buffer = self._buffers[name] = np.empty(size, self._dtype)
        return buffer[:size].reshape(shape)


def tile_of(plan: Plan) -> HostTile:
    """The tile of a plan of this backend.

    Raises
    ------
    ArgumentTypeError
        If the plan is of another backend.
    """
    if not isinstance(plan.tile, HostTile):
        raise ArgumentTypeError("plan", f"{plan}", "a plan of the numpy backend")
    return plan.tile


def _slices(length: int, block: int) -> list[slice]:
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def _staircase(block_q: int, dtype: np.dtype[Any], *, hidden_from_earlier: bool) -> Array:
    """The largest allowed scores at an edge: [key, query], minus infinity where hidden.

    Key k is hidden from the queries 0 to k, which come too early for it, or else from all later
    ones, which come too late. The result is a view of one row of 2 block_q - 1 numbers, in which
    every key has its own window.
    """
    early, late = (-np.inf, np.inf) if hidden_from_earlier else (np.inf, -np.inf)
    steps = np.full(2 * block_q - 1, late, dtype)
    steps[:block_q] = early
    return np.lib.stride_tricks.sliding_window_view(steps, block_q)[::-1]

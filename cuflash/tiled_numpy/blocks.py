"""How a problem is walked: blocks of rows, the tiles that the mask leaves, memory for them."""

from __future__ import annotations

import copy
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
    """A block of queries against those keys of a block that any of the queries sees."""

    queries: slice
    keys: slice
    rows: slice  # the queries among the folded rows


class Blocks:
    """The blocks of a plan and their tiles, in the order of either loop."""

    def __init__(self, plan: Plan) -> None:
        self.problem = plan.problem
        self.tile = tile_of(plan)
        self.compute = np.dtype(plan.problem.compute)
        self.queries = _slices(plan.problem.seqlen_q, self.tile.block_q)
        self.first_query = 0
        self.keys = _slices(plan.problem.seqlen_kv, self.tile.block_kv)
        causal = plan.problem.mask == "causal"
        self._staircase = _staircase(self.tile.block_q, self.compute) if causal else None
        self._of_thread = threading.local()

    @property
    def scratch(self) -> Scratch:
        """Memory that the tasks of one thread use one after another."""
        found: Scratch | None = getattr(self._of_thread, "scratch", None)
        if found is None:
            found = self._of_thread.scratch = Scratch(self.compute)
        return found

    @property
    def seen_keys(self) -> int:
        """How many of the first keys some query of these blocks sees."""
        if not self.queries:
            return 0
        if self._staircase is None:
            return self.problem.seqlen_kv
        last: int = self.queries[-1].stop + self.problem.q_offset
        return min(self.problem.seqlen_kv, max(0, last))

    def live(self, q: Array) -> Array:
        """Queries (batch, seqlen, head, width) with zeros where the mask shows no key at all.

        What these rows hold decides nothing. A copy only where there are such rows.
        """
        dead = -self.problem.q_offset if self._staircase is not None else 0
        if dead <= 0:
            return q
        q = q.copy()
        q[:, :dead] = 0
        return q

    def parts(self) -> list[Blocks]:
        """The blocks of queries in runs, as many as the plan says; their rows are disjoint."""
        count = len(self.queries)
        wanted = max(1, min(self.tile.parts, count))
        found = []
        for index in range(wanted):
            part = copy.copy(self)
            part.queries = self.queries[index * count // wanted : (index + 1) * count // wanted]
            part.first_query = part.queries[0].start if part.queries else 0
            found.append(part)
        return found

    def rows(self, queries: slice) -> slice:
        """Where a block of queries lies among the folded rows of these blocks."""
        group, first = self.problem.group, self.first_query
        return slice(group * (queries.start - first), group * (queries.stop - first))

    def of_queries(self, queries: slice) -> Iterator[Tile]:
        """The tiles of a block of queries, over the keys: FlashAttention-2's inner loop."""
        for keys in self.keys:
            stop = self._end_of_seen(queries, keys)
            if stop <= keys.start:
                return
            yield Tile(queries, slice(keys.start, stop), self.rows(queries))

    def of_keys(self, keys: slice) -> Iterator[Tile]:
        """The tiles of a block of keys, over the queries: FlashAttention-1's inner loop."""
        for queries in self.queries:
            stop = self._end_of_seen(queries, keys)
            if stop > keys.start:
                yield Tile(queries, slice(keys.start, stop), self.rows(queries))

    def hide(self, scores: Array, tile: Tile) -> None:
        """Set what the mask hides to minus infinity; keys that every query sees are not read.

        Scores are (batch, head, key, row). A NaN that is seen may become plus
        infinity, which makes its row NaN just as well.
        """
        if self._staircase is None:
            return
        first_hidden = tile.queries.start + self.problem.q_offset + 1  # from the first query
        first = max(first_hidden, tile.keys.start)
        if first >= tile.keys.stop:
            return
        length = tile.queries.stop - tile.queries.start
        limit = self._staircase[first - first_hidden : tile.keys.stop - first_hidden, :length]
        edge = scores[:, :, first - tile.keys.start :]
        edge = edge.reshape(*edge.shape[:3], self.problem.group, length)
        np.fmin(edge, limit[:, None], out=edge)

    def _end_of_seen(self, queries: slice, keys: slice) -> int:
        """The last query sees most: the end of what it sees of these keys."""
        if self._staircase is None:
            return int(keys.stop)
        return int(min(keys.stop, queries.stop + self.problem.q_offset))


class Scratch:
    """Memory that serves one tile after another."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._buffers: dict[str, Array] = {}

    def array(self, name: str, shape: tuple[int, ...]) -> Array:
        """A contiguous array, its contents undefined, valid until its name is asked for again."""
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
        If it is of another one.
    """
    if not isinstance(plan.tile, HostTile):
        raise ArgumentTypeError("plan", f"{plan}", "a plan of the numpy backend")
    return plan.tile


def _slices(length: int, block: int) -> list[slice]:
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def _staircase(block_q: int, dtype: np.dtype[Any]) -> Array:
    """What scores at the edge may be at most: [key, query], minus infinity where hidden.

    Key 0 is the first that query 0 does not see, so the query must come after
    the key. A view of one row of 2 block_q - 1 numbers, of which every key
    sees another window.
    """
    steps = np.full(2 * block_q - 1, np.inf, dtype)
    steps[:block_q] = -np.inf
    return np.lib.stride_tricks.sliding_window_view(steps, block_q)[::-1]

"""The gradient of a bias: dS, summed over the axes along which the bias is broadcast.

One task owns each part of the result. It walks over the heads and entries that share the part in a
fixed order and recomputes their dS. No sum waits for another one, and only the result is quadratic
in size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..planning.plan import Plan
from .blocks import Array, Blocks, Tile, tile_of
from .by_entry import Part
from .gradients import Given, Gradients
from .heads import Heads
from .operands import Operands
from .terms import terms_of
from .threads import Task

__all__ = ["BiasGradient"]


@dataclass(frozen=True)
class _Walked:
    """Some heads of some entries, with their blocks of queries in runs."""

    given: Given
    runs: list[Blocks]
    heads: Heads
    operands: Operands
    first: int  # the first entry of these heads

    @property
    def entries(self) -> slice:
        """The entries of the call."""
        own = self.heads.entries
        return slice(self.first + own.start, self.first + own.stop)


class BiasGradient:
    """The sums of one call.

    Parameters
    ----------
    plan
        The plan of the backward pass.
    parts
        The parts of the call, with their arrays.
    result
        Destination, which broadcasts against (batch, heads_q, seqlen_q, seqlen_kv).
    """

    def __init__(self, plan: Plan, parts: Sequence[Part[Given]], result: Array) -> None:
        self._problem, self._tile = plan.problem, tile_of(plan)
        whole = Blocks(plan)
        self._calls = [(part, Blocks(part.plan, whole)) for part in parts]
        self._result = result[(None,) * (4 - result.ndim)]
        self._by_rows = self._result.shape[2] > 1
        self._count = len(self._runs(whole))
        #: Where parts of the queries share the result: the contribution of each part.
        self._shared: Array | None = None
        if not self._by_rows:
            self._shared = np.zeros((self._count, *self._result.shape), self._problem.compute)

    def tasks(self) -> Iterator[Task]:
        """Tasks that compute every part."""
        for sharing in self._owners():
            for index in range(self._count):
                yield functools.partial(self._run, sharing, index)

    def finish(self) -> None:
        """After the tasks: add up the contributions of the parts of queries, and round once."""
        if self._shared is not None:
            self._result[...] = self._shared.sum(axis=0)
        elif self._problem.batch * self._problem.heads_q == 0:
            self._result[...] = 0  # no task writes it

    def _runs(self, blocks: Blocks) -> list[Blocks]:
        """Blocks of queries, one by one if the result has rows."""
        return blocks.parts(len(blocks.queries) if self._by_rows else self._tile.parts)

    def _owners(self) -> Iterator[list[_Walked]]:
        """Heads and entries, grouped by the part of the result that they share."""
        found: dict[tuple[int, int], list[_Walked]] = {}
        heads, shared = self._result.shape[1] > 1, self._sharing
        some = 1 < shared < self._problem.batch
        for part, blocks in self._calls:
            given, runs = part.given, self._runs(blocks)
            live, terms = blocks.live(given.q), terms_of(part.plan.problem, given.more)
            for one in Heads.of(blocks, most_entries=1 if some else None):
                operands = Operands(blocks, one, live, given.k, given.v, terms)
                walked = _Walked(given, runs, one, operands, part.first)
                key = walked.entries.start // shared, one.query_heads.start if heads else 0
                found.setdefault(key, []).append(walked)
        yield from found.values()

    @property
    def _sharing(self) -> int:
        """The number of batch entries that share one entry of the result."""
        return max(1, int(self._problem.batch // max(1, self._result.shape[0])))

    def _run(self, sharing: list[_Walked], index: int) -> None:
        shape, shared, first = self._result.shape, self._sharing, sharing[0]
        rows = slice(0, 1)
        if self._by_rows:
            length = self._tile.block_q
            rows = slice(index * length, min(index * length + length, shape[2]))
        entries = first.entries
        if shared > 1:
            entries = slice(entries.start // shared, entries.start // shared + 1)
        heads = first.heads.query_heads if shape[1] > 1 else slice(0, 1)
        sizes = [s.stop - s.start for s in (entries, heads, rows)]
        total = np.zeros((*sizes, shape[3]), self._problem.compute)
        for one in sharing:
            if index < len(one.runs):
                self._add(total, one.runs[index], one)
        if self._shared is None:
            self._result[entries, heads, rows] = total
        else:
            self._shared[index, entries, heads] = total

    def _add(self, total: Array, part: Blocks, walked: _Walked) -> None:
        """Add the contribution of some heads to a part of the result."""
        gradients = Gradients(part, walked.heads.part(part), walked.operands)
        rows = gradients.load(walked.given)
        delta = rows.delta(slice(None))
        sizes = (1 if self._sharing > 1 else 0, *self._result.shape[1:])
        lacking = tuple(axis for axis, size in enumerate(sizes) if size == 1)
        for queries in part.queries:
            for tile in part.of_queries(queries):
                pairs = self._pairs(gradients.dscores(tile, rows, delta[:, :, tile.rows]), tile)
                own_rows = slice(None)
                if self._by_rows:
                    own_rows = slice(
                        tile.queries.start - part.first_query, tile.queries.stop - part.first_query
                    )
                own_keys = tile.keys if self._result.shape[3] > 1 else slice(None)
                total[:, :, own_rows, own_keys] += pairs.sum(axis=lacking, keepdims=True)

    def _pairs(self, gradients: Array, tile: Tile) -> Array:
        """(batch, head, key, row) -> (batch, head of queries, query, key)."""
        batch, heads, keys, _ = gradients.shape
        group, length = self._problem.group, tile.queries.stop - tile.queries.start
        by_group = gradients.reshape(batch, heads, keys, group, length).transpose(0, 1, 3, 4, 2)
        pairs: Array = by_group.reshape(batch, heads * group, length, keys)
        return pairs

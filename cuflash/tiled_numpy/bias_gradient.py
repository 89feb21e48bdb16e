"""The gradient of a bias: dS, summed over what the bias is broadcast over.

Every part of the result belongs to one task, which walks over the heads and
entries that share it in one order and recomputes their dS: no sums wait for
each other, and there is nothing quadratic but the result.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from ..planning.plan import Plan
from .blocks import Array, Blocks, Tile
from .gradients import Given, Gradients
from .heads import Heads
from .operands import Operands
from .terms import terms_of
from .threads import Task

__all__ = ["BiasGradient"]


class BiasGradient:
    """The sums of one call.

    Parameters
    ----------
    plan
        Of the backward pass.
    given
        The arrays of the call.
    result
        Destination, which broadcasts against (batch, heads_q, seqlen_q, seqlen_kv).
    """

    def __init__(self, plan: Plan, given: Given, result: Array) -> None:
        self._plan, self._given = plan, given
        self._blocks = Blocks(plan)
        self._result = result[(None,) * (4 - result.ndim)]
        self._by_rows = self._result.shape[2] > 1
        count = len(self._blocks.queries) if self._by_rows else self._blocks.tile.parts
        self._parts = self._blocks.parts(count)
        #: Where parts of the queries share the result, what each of them gives.
        self._shared: Array | None = None
        if not self._by_rows:
            self._shared = np.zeros((len(self._parts), *self._result.shape), self._blocks.compute)

    def tasks(self) -> Iterator[Task]:
        """Tasks that compute every part."""
        live = self._blocks.live(self._given.q)
        terms = terms_of(self._plan.problem, self._given.more)
        for sharing in self._owners():
            walked = [
                (heads, Operands(self._blocks, heads, live, self._given.k, self._given.v, terms))
                for heads in sharing
            ]
            for index in range(len(self._parts)):
                yield functools.partial(self._run, walked, index)

    def finish(self) -> None:
        """After the tasks: add up what the parts of the queries share, and round it once."""
        if self._shared is not None:
            self._result[...] = self._shared.sum(axis=0)
        elif self._plan.problem.batch * self._plan.problem.heads_q == 0:
            self._result[...] = 0  # which no task has

    def _owners(self) -> Iterator[list[Heads]]:
        """Heads and entries, those together that share a part of the result."""
        found: dict[tuple[int, int], list[Heads]] = {}
        heads, shared = self._result.shape[1] > 1, self._sharing
        some = 1 < shared < self._plan.problem.batch
        for one in Heads.of(self._blocks, most_entries=1 if some else None):
            key = one.entries.start // shared, one.query_heads.start if heads else 0
            found.setdefault(key, []).append(one)
        yield from found.values()

    @property
    def _sharing(self) -> int:
        """Entries of the batch that share one of the result."""
        return max(1, int(self._plan.problem.batch // max(1, self._result.shape[0])))

    def _run(self, walked: list[tuple[Heads, Operands]], index: int) -> None:
        part, first = self._parts[index], walked[0][0]
        rows = slice(0, 1)
        if self._by_rows:
            stop = part.queries[-1].stop if part.queries else part.first_query
            rows = slice(part.first_query, stop)
        shape, shared = self._result.shape, self._sharing
        entries = first.entries
        if shared > 1:
            entries = slice(entries.start // shared, entries.start // shared + 1)
        heads = first.query_heads if shape[1] > 1 else slice(0, 1)
        sizes = [s.stop - s.start for s in (entries, heads, rows)]
        total = np.zeros((*sizes, shape[3]), part.compute)
        for one, operands in walked:
            self._add(total, part, one.part(part), operands)
        if self._shared is None:
            self._result[entries, heads, rows] = total
        else:
            self._shared[index, entries, heads] = total

    def _add(self, total: Array, part: Blocks, heads: Heads, operands: Operands) -> None:
        """What some heads give to a part of the result."""
        gradients = Gradients(part, heads, operands)
        rows = gradients.load(self._given)
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
        group, length = self._plan.problem.group, tile.queries.stop - tile.queries.start
        by_group = gradients.reshape(batch, heads, keys, group, length).transpose(0, 1, 3, 4, 2)
        pairs: Array = by_group.reshape(batch, heads * group, length, keys)
        return pairs

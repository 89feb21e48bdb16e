"""The parts of the forward pass that do not depend on the order of a task's tiles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from ..planning.plan import Plan
from .blocks import Array, Blocks
from .common_part import row_shift
from .heads import Heads
from .operands import Operands
from .steps import RowState, finish
from .terms import terms_of
from .threads import Task

__all__ = ["GivenForward", "tasks"]


@dataclass(frozen=True)
class GivenForward:
    """The arrays of the call."""

    q: Array
    k: Array
    v: Array
    out: Array
    lse: Array | None
    sinks: Array | None
    more: Mapping[str, Array]  # of other features


#: An algorithm's computation for the rows of a task: normalised output, maximum and sum.
Inner = Callable[[Blocks, Operands, Array, RowState], None]


def tasks(plan: Plan, inner: Inner, given: GivenForward) -> Iterator[Task]:
    """The tasks of a forward pass: each has some heads and a part of their queries."""
    blocks = Blocks(plan)
    given, terms = replace(given, q=blocks.live(given.q)), terms_of(plan.problem, given.more)
    for heads in Heads.of(blocks):
        operands = Operands(blocks, heads, given.q, given.k, given.v, terms)
        for part in blocks.parts():
            yield functools.partial(_run, part, heads.part(part), operands, inner, given)


def _run(
    blocks: Blocks, heads: Heads, operands: Operands, inner: Inner, given: GivenForward
) -> None:
    made = operands.make()
    scaled_q = heads.rows(given.q)
    scaled_q *= blocks.problem.scale
    state = RowState.start((*scaled_q.shape[:3], made.values.shape[-1]), blocks.compute)
    inner(blocks, made, scaled_q, state)
    if made.inverse_keep != 1:
        state.out *= made.inverse_keep
    shift = None if made.common is None else row_shift(scaled_q, made.common)
    sinks = None if given.sinks is None else heads.sinks(given.sinks)
    lse = finish(state, shift, sinks)
    heads.set_rows(given.out, state.out)
    if given.lse is not None:
        heads.set_statistics(given.lse, lse)

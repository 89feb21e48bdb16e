"""Splits a call with used or packed lengths: each batch entry or sequence is its own problem.

The arrays of such a problem are views of its rows, so other rows are never read. Arrays with a
number for each pair of query and key, such as a bias, are not cut: features index them with the
position that a pair has in the whole call.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from ..features.host import HostPart, ScorePlace
from ..features.use import Use
from ..planning.plan import Plan
from ..planning.problem import AttentionProblem
from ..planning.visibility import bounds_that_hide, mask_of
from .blocks import Array
from .gradient_rows import ByRow, Given
from .outputs import GivenForward

__all__ = ["Part", "parts_of"]

_Given = TypeVar("_Given", Given, GivenForward)

#: The arrays of either pass whose rows are queries, and those whose rows are keys.
_OF_QUERIES, _OF_KEYS = ("q", "dout", "out", "dq"), ("k", "v", "dk", "dv")
_STATISTICS = ("lse", "dlse")
#: The results of a pass, and their values in unused rows.
_WRITTEN = {
    "forward": {"out": 0.0, "lse": -np.inf},
    "backward": {"dq": 0.0, "dk": 0.0, "dv": 0.0},
}


@dataclass(frozen=True)
class _Rows:
    """The rows of one entry or sequence in the arrays of the call.

    Attributes
    ----------
    entry
        The batch entry of the arrays.
    queries, keys
        The rows, as slices with both ends.
    """

    entry: int
    queries: slice
    keys: slice

    @property
    def lengths(self) -> tuple[int, int]:
        """The numbers of queries and keys."""
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start


#: The rows of every entry or sequence, in order, and the rows that do not count.
_Found = tuple[list[_Rows], list[_Rows]]


@dataclass(frozen=True)
class Part(Generic[_Given]):
    """The entries of a call that form one problem: all of them, or one.

    Attributes
    ----------
    plan
        The plan for these entries.
    given
        Their arrays; those of features cover the whole call.
    first
        The first of the entries, or the number of a sequence.
    rows
        The rows of the entry or sequence in the arrays; None if the part is the whole call.
    """

    plan: Plan
    given: _Given
    first: int = 0
    rows: _Rows | None = None

    def statistics(self, by_row: ByRow) -> ByRow:
        """The part of these entries in arrays with one number per row."""
        if self.rows is None:
            return by_row
        entry, queries = self.rows.entry, self.rows.queries
        sinks, pairs = (
            None if array is None else array[entry : entry + 1, :, queries]
            for array in (by_row.sinks, by_row.pairs)
        )
        return ByRow(sinks, pairs)


def parts_of(plan: Plan, given: _Given) -> list[Part[_Given]]:
    """The parts of a call: the call itself if all rows count, else one for each entry.

    Also writes the results of rows that do not count.
    """
    problem = plan.problem
    use = next((use for use in problem.uses if use.feature in _FINDERS), None)
    if use is None:
        return [Part(plan, given)]
    counting, others = _FINDERS[use.feature](problem, given.more)
    for rows in others:
        _clear(problem, _cut(given, rows))
    from_the_end = bool(dict(use.numbers)["bottom_right"])
    parts = []
    for number, rows in enumerate(counting):
        queries, keys = rows.lengths
        shift = keys - problem.seqlen_kv - (queries - problem.seqlen_q) if from_the_end else 0
        own = replace(plan, problem=_problem_of(problem, number, rows.lengths, shift))
        parts.append(Part(own, _cut(given, rows), number, rows))
    return parts


def _find_used(problem: AttentionProblem, arrays: Mapping[str, Array]) -> _Found:
    """The first rows of every entry, and the rows after them."""
    lengths = problem.seqlen_q, problem.seqlen_kv
    counts = zip(
        _counting(arrays.get("seqused_q"), problem.batch, lengths[0]),
        _counting(arrays.get("seqused_kv"), problem.batch, lengths[1]),
        strict=True,
    )
    counting, others = [], []
    for entry, ends in enumerate(counts):
        counting.append(_Rows(entry, *map(slice, (0, 0), ends)))
        others.append(_Rows(entry, *map(slice, ends, lengths)))
    return counting, others


def _counting(lengths: Array | None, batch: int, seqlen: int) -> list[int]:
    """The number of rows of every entry that count; lengths are clamped to the array."""
    if lengths is None:
        return [seqlen] * batch
    return [int(rows) for rows in np.clip(lengths, 0, seqlen)]


def _find_packed(problem: AttentionProblem, arrays: Mapping[str, Array]) -> _Found:
    """The rows of every sequence, and those after the last one."""
    rows = zip(
        _between(arrays["cu_seqlens_q"], problem.seqlen_q),
        _between(arrays["cu_seqlens_kv"], problem.seqlen_kv),
        strict=True,
    )
    *counting, behind = itertools.starmap(functools.partial(_Rows, 0), rows)
    return counting, [behind]


def _between(offsets: Array, total: int) -> list[slice]:
    """Rows from each offset to the next, the first from row 0 and the last to the end.

    An offset outside of the array, or before an earlier one, is replaced by the nearest valid one,
    as ``make_begins`` does on the device.
    """
    begins = [0, *np.maximum.accumulate(np.clip(offsets[1:], 0, total)).tolist(), total]
    return list(itertools.starmap(slice, itertools.pairwise(begins)))


#: Functions that find the rows of parts, by feature.
_FINDERS: dict[str, Callable[[AttentionProblem, Mapping[str, Array]], _Found]] = {
    "used_lengths": _find_used,
    "packed_lengths": _find_packed,
}


def _clear(problem: AttentionProblem, given: Any) -> None:
    """Write the values of rows that do not count."""
    for name, value in _WRITTEN[problem.operation].items():
        array = getattr(given, name)
        if array is not None:
            array[...] = value


def _cut(given: _Given, rows: _Rows) -> _Given:
    """Views of the arrays, restricted to some rows."""
    one = slice(rows.entry, rows.entry + 1)
    places: dict[str, Any] = {
        **dict.fromkeys(_OF_QUERIES, (one, rows.queries)),
        **dict.fromkeys(_OF_KEYS, (one, rows.keys)),
        **dict.fromkeys(_STATISTICS, (one, slice(None), rows.queries)),
    }
    arrays: dict[str, Array | None] = {name: getattr(given, name, None) for name in places}
    cut: dict[str, Any] = {
        name: array[places[name]] for name, array in arrays.items() if array is not None
    }
    return replace(given, **cut)


def _problem_of(
    problem: AttentionProblem, number: int, lengths: tuple[int, int], shift: int
) -> AttentionProblem:
    """The problem of one entry.

    Its query 0 is aligned to the key ``shift`` places after the key that the whole call gives it.
    """
    seen = problem.visibility
    bounds = [None if bound is None else bound + shift for bound in (seen.first, seen.last)]
    first, last = bounds_that_hide(*lengths, (bounds[0], bounds[1]))
    return replace(
        problem,
        batch=1,
        seqlen_q=lengths[0],
        seqlen_kv=lengths[1],
        sequences=0,
        mask=mask_of((first, last)),
        q_offset=last or 0,
        q_first=first or 0,
        uses=tuple(_use_of(use, number, shift) for use in problem.uses),
    )


def _use_of(use: Use, number: int, shift: int) -> Use:
    """A feature in an entry's own problem, where the entry has number 0."""
    numbers = tuple((n, x + shift if n == "position" else x) for n, x in use.numbers)
    host = use.host
    if host is not None:
        functions = (host.score, host.with_slope, host.partial, host.kept)
        host = HostPart(*(f and functools.partial(_at_entry, f, number) for f in functions))
    return replace(use, numbers=numbers, host=host)


def _at_entry(function: Callable[..., Any], number: int, *given: Any) -> Any:
    """Call a feature's function; the position that it gets holds the entry's number in the call."""
    return function(
        *(replace(x, batch=x.batch + number) if isinstance(x, ScorePlace) else x for x in given)
    )

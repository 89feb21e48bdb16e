"""Used lengths: every entry of the batch is a problem of its own, of the rows that count.

Its arrays are views of these rows, so what the others hold is never read. What
features have of all pairs stays whole: pairs are named by their places in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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

#: The arrays of either pass, by what their rows are.
_OF_QUERIES, _OF_KEYS = ("q", "dout", "out", "dq"), ("k", "v", "dk", "dv")
_STATISTICS = ("lse", "dlse")
#: What a pass writes, and what stands there in rows that do not count.
_WRITTEN = {
    "forward": {"out": 0.0, "lse": -np.inf},
    "backward": {"dq": 0.0, "dk": 0.0, "dv": 0.0},
}


@dataclass(frozen=True)
class Part(Generic[_Given]):
    """Entries of a call that are computed as one problem: all of them, or one.

    Attributes
    ----------
    plan
        Of these entries.
    given
        Their arrays; those of features are the whole call's.
    first
        The first of the entries.
    """

    plan: Plan
    given: _Given
    first: int = 0

    def statistics(self, by_row: ByRow) -> ByRow:
        """The part of these entries of what every row gives."""
        problem = self.plan.problem
        entries, queries = slice(self.first, self.first + problem.batch), slice(problem.seqlen_q)
        sinks, pairs = (
            None if array is None else array[entries, :, queries]
            for array in (by_row.sinks, by_row.pairs)
        )
        return ByRow(sinks, pairs)


def parts_of(plan: Plan, given: _Given) -> list[Part[_Given]]:
    """The parts of a call: the call itself where every row counts, else its entries.

    What stands in results of rows that do not count is then written.
    """
    problem = plan.problem
    use = next((use for use in problem.uses if use.feature == "used_lengths"), None)
    if use is None:
        return [Part(plan, given)]
    parts = []
    from_the_end = bool(dict(use.numbers)["bottom_right"])
    of_queries = _counting(given.more.get("seqused_q"), problem.batch, problem.seqlen_q)
    of_keys = _counting(given.more.get("seqused_kv"), problem.batch, problem.seqlen_kv)
    for entry, (queries, keys) in enumerate(zip(of_queries, of_keys, strict=True)):
        _clear(problem, given, entry, queries, keys)
        shift = keys - problem.seqlen_kv - (queries - problem.seqlen_q) if from_the_end else 0
        own = replace(plan, problem=_problem_of(problem, entry, queries, keys, shift))
        parts.append(Part(own, _cut(given, entry, queries, keys), entry))
    return parts


def _counting(lengths: Array | None, batch: int, seqlen: int) -> list[int]:
    """How many rows of every entry count; of lengths beyond what is there the nearest."""
    if lengths is None:
        return [seqlen] * batch
    return [int(rows) for rows in np.clip(lengths, 0, seqlen)]


def _clear(problem: AttentionProblem, given: Any, entry: int, queries: int, keys: int) -> None:
    """Write what stands in the rows of an entry that do not count."""
    for name, value in _WRITTEN[problem.operation].items():
        array = getattr(given, name)
        if array is None:
            continue
        if name in _STATISTICS:
            array[entry, :, queries:] = value
        else:
            array[entry, keys if name in _OF_KEYS else queries :] = value


def _cut(given: _Given, entry: int, queries: int, keys: int) -> _Given:
    """The rows of an entry that count, as views."""
    one = slice(entry, entry + 1)
    places: dict[str, Any] = {
        **dict.fromkeys(_OF_QUERIES, (one, slice(queries))),
        **dict.fromkeys(_OF_KEYS, (one, slice(keys))),
        **dict.fromkeys(_STATISTICS, (one, slice(None), slice(queries))),
    }
    arrays: dict[str, Array | None] = {name: getattr(given, name, None) for name in places}
    cut: dict[str, Any] = {
        name: array[places[name]] for name, array in arrays.items() if array is not None
    }
    return replace(given, **cut)


def _problem_of(
    problem: AttentionProblem, entry: int, queries: int, keys: int, shift: int
) -> AttentionProblem:
    """The problem of an entry whose query 0 stands ``shift`` keys further on."""
    seen = problem.visibility
    bounds = [None if bound is None else bound + shift for bound in (seen.first, seen.last)]
    first, last = bounds_that_hide(queries, keys, (bounds[0], bounds[1]))
    return replace(
        problem,
        batch=1,
        seqlen_q=queries,
        seqlen_kv=keys,
        mask=mask_of((first, last)),
        q_offset=last or 0,
        q_first=first or 0,
        uses=tuple(_use_of(use, entry, shift) for use in problem.uses),
    )


def _use_of(use: Use, entry: int, shift: int) -> Use:
    """What a feature does in an entry, whose number is 0 in the problem of its own."""
    numbers = tuple((n, x + shift if n == "position" else x) for n, x in use.numbers)
    host = use.host
    if host is not None:
        functions = (host.score, host.with_slope, host.partial, host.kept)
        host = HostPart(*(f and functools.partial(_at_entry, f, entry) for f in functions))
    return replace(use, numbers=numbers, host=host)


def _at_entry(function: Callable[..., Any], entry: int, *given: Any) -> Any:
    """Call a function of a place with the entry's own number in it."""
    return function(
        *(replace(x, batch=x.batch + entry) if isinstance(x, ScorePlace) else x for x in given)
    )

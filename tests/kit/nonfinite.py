"""One element that is not finite, and the results that it must reach: those that see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash import reference

from .case import OF_HEADS, Case
from .data import arrays, operands

__all__ = ["SPOILED", "Spoiled", "spoiled"]

#: The largest error of an unreached result, relative to the largest number.
_TOLERANCE = {"float16": 2e-2, "bfloat16": 1e-1, "float32": 1e-4, "float64": 1e-10}
#: A tensor, and the new value of one of its elements.
SPOILED = (
    ("q", np.nan),
    ("k", np.nan),
    ("v", np.nan),
    ("v", np.inf),
    ("dout", np.nan),
    ("dlse", np.nan),
)


@dataclass(frozen=True)
class Spoiled:
    """Inputs with one spoiled element.

    Attributes
    ----------
    slack
        Rows or keys at the edge of the mask that share a tile with pairs hidden from them: these
        may also be reached.
    """

    case: Case
    x: dict[str, np.ndarray]
    name: str
    head: int
    place: int
    slack: int

    def check(self, results: Mapping[str, np.ndarray]) -> None:
        """Raise AssertionError unless exactly the right rows of every result are not finite."""
        for name, truth in self._truth().items():
            got = self.case.heads_first(name, results[name]).astype(np.float64)
            bad, right = ~np.isfinite(truth), np.isfinite(got)
            dead = (truth == -np.inf) & (name == "lse")  # rows that see nothing
            where = f"{name} with {self.name} at row {self.place}: {self.case.repro}"
            assert not (right & bad & ~dead).any(), f"{where}: it does not come out"
            assert (got[dead] == -np.inf).all(), where
            kept = ~bad & ~self._may(name, truth)
            assert right[kept].all(), f"{where}: it comes out of what does not see it"
            most = np.abs(truth[~bad]).max(initial=1)
            error = np.abs(np.where(kept, got, 0) - np.where(kept, truth, 0)).max(initial=0)
            assert error <= _TOLERANCE[self.case.dtype] * most, f"{where}: off by {error}"

    def _truth(self) -> dict[str, np.ndarray]:
        options: dict[str, Any] = {**self.case.options, **operands(self.case), "dtype": np.float64}
        q, k, v = (self.x[name] for name in "qkv")
        with np.errstate(all="ignore"):
            out, lse = reference.attention(q, k, v, **options)
            grads = reference.attention_backward(
                self.x["dout"], q, k, v, dlse=self.x["dlse"], **options
            )
        named = zip(("out", "lse", *self.case.gradients), (out, lse, *grads), strict=True)
        return {name: self.case.heads_first(name, array) for name, array in named}

    def _may(self, name: str, truth: np.ndarray) -> np.ndarray:
        """Rows that share a tile with an edge of the visible pairs, in the heads that are
        reached."""
        may = np.zeros(truth.shape, bool)
        group, of_query = self.case.group, self.name in ("q", "dout", "dlse")
        if name in OF_HEADS:  # all rows of a head share its number
            first, count = (self.head, 1) if of_query else (self.head * group, group)
            may[(0,) * (may.ndim - 1)][first : first + count] = True
            return may
        if name == "dbias":
            return self._may_of_pairs(truth)
        begin, end = self.case.visible_range()
        if (begin == 0).all() and (end == self.case.seqlen_kv).all():
            return may
        of_keys = name in ("dk", "dv")
        if of_query:
            reached = np.array([self.place])
        else:
            reached = np.flatnonzero((begin <= self.place) & (self.place < end))
            if not reached.size:  # no query sees it: take the first that would
                reached = np.minimum([(end <= self.place).sum()], self.case.seqlen_q - 1)
        edges = [reached[0], reached[-1]]
        if of_keys:  # all keys of rows that are reached, and keys in the same tiles
            edges = [self.place] * (not of_query) + [begin[edges[0]], end[edges[1]]]
            edges += [begin[0], end[-1]]
        head = self.head // group if of_query else self.head
        heads = [head] if of_keys else range(head * group, (head + 1) * group)
        for at in edges:
            for one in heads:
                may[0, one, max(0, at - self.slack) : at + self.slack] = True
        return may

    def _may_of_pairs(self, truth: np.ndarray) -> np.ndarray:
        """Pairs of rows that are or may be reached, in tiles that neighbouring rows see."""
        case, (begin, end) = self.case, self.case.visible_range()
        pairs = np.zeros((case.heads_q, case.seqlen_q, case.seqlen_kv), bool)
        of_query = self.name in ("q", "dout", "dlse")
        heads, rows, last = [self.head], np.array([self.place]), case.seqlen_q - 1
        if not of_query:
            heads = [*range(self.head * case.group, (self.head + 1) * case.group)]
            rows = np.flatnonzero((begin <= self.place) & (self.place < end))
            if not rows.size:
                rows = np.minimum([(end <= self.place).sum()], last)
            rows = np.arange(max(0, rows[0] - self.slack), min(last, rows[-1] + self.slack) + 1)
        for i in rows:
            first = begin[max(0, i - self.slack)] - self.slack
            pairs[heads, i, max(0, first) : end[min(last, i + self.slack)] + self.slack] = True
        may = np.zeros(truth.shape, bool)
        whole = may.reshape((1,) * (4 - may.ndim) + may.shape)
        over = tuple(axis for axis in range(3) if whole.shape[axis + 1] == 1)
        whole[0] = pairs.any(axis=over, keepdims=True)
        return may


def spoiled(case: Case, name: str, value: float, place: float, slack: int) -> Spoiled:
    """The case's inputs with one element of a tensor spoiled; ``place``, 0 to 1, selects its
    row."""
    x = {n: a.copy() for n, a in arrays(case, "q", "k", "v", "dout", "dlse").items()}
    rows = case.heads_first(name, x[name])
    row, head = int(place * (rows.shape[2] - 1)), rows.shape[1] - 1
    if name == "dlse":
        rows[0, head, row] = value
    else:
        rows[0, head, row, rows.shape[3] // 2] = value
    return Spoiled(case, x, name, head, row, slack)

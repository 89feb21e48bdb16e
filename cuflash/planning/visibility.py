"""Which keys a query sees, in numbers: what loops visit and what reckonings of work count.

``cuda_src/tile/mask.cuh`` and ``tile/schedule.cuh`` say the same on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Bounds", "MaskKind", "Visibility", "bounds_that_hide", "mask_of"]

MaskKind = Literal["full", "causal", "left", "band"]
#: The first and the last key that query 0 sees; None for a bound that hides nothing.
Bounds = tuple[int | None, int | None]


def bounds_that_hide(seqlen_q: int, seqlen_kv: int, bounds: Bounds) -> Bounds:
    """The same bounds, None for one that hides nothing."""
    first, last = bounds
    if first is not None and first + seqlen_q - 1 <= 0:
        first = None
    if last is not None and last >= seqlen_kv - 1:
        last = None
    return first, last


def mask_of(bounds: Bounds) -> MaskKind:
    """Which bounds there are, by the name that kernels have for it."""
    first, last = bounds
    if first is None:
        return "full" if last is None else "causal"
    return "left" if last is None else "band"


@dataclass(frozen=True)
class Visibility:
    """Query i sees key j iff ``i + first <= j <= i + last``; None: no such bound.

    So every query sees one interval of keys, and the interval of the next query
    begins and ends one later.
    """

    seqlen_q: int
    seqlen_kv: int
    first: int | None = None
    last: int | None = None

    def keys_seen(self, begin: int, end: int) -> tuple[int, int]:
        """The keys that some query of [begin, end) may see: a range, (0, 0) if there are none."""
        first = 0 if self.first is None else max(0, begin + self.first)
        last = self.seqlen_kv if self.last is None else min(self.seqlen_kv, end + self.last)
        return (first, last) if first < last else (0, 0)

    def queries_seeing(self, begin: int, end: int) -> tuple[int, int]:
        """The queries that may see some key of [begin, end): a range, (0, 0) if there are none."""
        first = 0 if self.last is None else max(0, begin - self.last)
        last = self.seqlen_q if self.first is None else min(self.seqlen_q, end - self.first)
        return (first, last) if first < last else (0, 0)

    @property
    def most_keys(self) -> int:
        """Keys that the query sees which sees most."""
        if not self.seqlen_q:
            return 0
        # The number rises until the first bound leaves key 0, and falls from where the last one
        # reaches the end.
        turning = (0, -(self.first or 0), self.seqlen_kv - 1 - (self.last or 0))
        queries = (min(max(0, query), self.seqlen_q - 1) for query in turning)
        ranges = (self.keys_seen(query, query + 1) for query in queries)
        return max(end - begin for begin, end in ranges)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        everything = self.seqlen_q * self.seqlen_kv
        ends = everything if self.last is None else self._sum_clipped(self.last + 1)
        begins = 0 if self.first is None else self._sum_clipped(self.first)
        return max(0, ends - begins)

    def _sum_clipped(self, shift: int) -> int:
        """Of ``i + shift``, cut at 0 and at seqlen_kv, over the queries i."""
        queries, keys = self.seqlen_q, self.seqlen_kv
        begin = min(queries, max(0, -shift))  # before it the terms are 0
        end = min(queries, max(begin, keys - shift))  # from it on they are seqlen_kv
        between = (begin + end - 1 + 2 * shift) * (end - begin) // 2
        return between + keys * (queries - end)

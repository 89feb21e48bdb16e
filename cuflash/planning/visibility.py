"""The keys that a query sees: ranges for loops, and counts for estimates of work.

``cuda_src/tile/mask.cuh`` and ``tile/schedule.cuh`` do the same on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Bounds", "MaskKind", "Visibility", "bounds_that_hide", "mask_of"]

MaskKind = Literal["full", "causal", "left", "band"]
#: The first and the last key that query 0 sees; None for a bound that hides nothing.
Bounds = tuple[int | None, int | None]


def bounds_that_hide(seqlen_q: int, seqlen_kv: int, bounds: Bounds) -> Bounds:
    """Return the bounds with None for a bound that hides nothing."""
    first, last = bounds
    if first is not None and first + seqlen_q - 1 <= 0:
        first = None
    if last is not None and last >= seqlen_kv - 1:
        last = None
    return first, last


def mask_of(bounds: Bounds) -> MaskKind:
    """Return the kernels' name of a mask with these bounds."""
    first, last = bounds
    if first is None:
        return "full" if last is None else "causal"
    return "left" if last is None else "band"


@dataclass(frozen=True)
class Visibility:
    """Query i sees key j iff ``i + first <= j <= i + last``; None: no such bound.

    Every query sees one interval of keys, and the interval of the next query
    begins and ends one key later.
    """

    seqlen_q: int
    seqlen_kv: int
    first: int | None = None
    last: int | None = None

    def keys_seen(self, begin: int, end: int) -> tuple[int, int]:
        """Return the range of keys that some query of [begin, end) may see; (0, 0) if empty."""
        first = 0 if self.first is None else max(0, begin + self.first)
        last = self.seqlen_kv if self.last is None else min(self.seqlen_kv, end + self.last)
        return (first, last) if first < last else (0, 0)

    def queries_seeing(self, begin: int, end: int) -> tuple[int, int]:
        """Return the range of queries that may see some key of [begin, end); (0, 0) if empty."""
        first = 0 if self.last is None else max(0, begin - self.last)
        last = self.seqlen_q if self.first is None else min(self.seqlen_q, end - self.first)
        return (first, last) if first < last else (0, 0)

    @property
    def most_keys(self) -> int:
        """Largest number of keys that a query sees."""
        if not self.seqlen_q:
            return 0
        # The number rises until the first bound leaves key 0, and falls after the last bound
        # reaches the end.
        turning = (0, -(self.first or 0), self.seqlen_kv - 1 - (self.last or 0))
        queries = (min(max(0, query), self.seqlen_q - 1) for query in turning)
        ranges = (self.keys_seen(query, query + 1) for query in queries)
        return max(end - begin for begin, end in ranges)

    @property
    def pairs(self) -> int:
        """Number of visible pairs of a query and a key."""
        everything = self.seqlen_q * self.seqlen_kv
        ends = everything if self.last is None else self._sum_clipped(self.last + 1)
        begins = 0 if self.first is None else self._sum_clipped(self.first)
        return max(0, ends - begins)

    def _sum_clipped(self, shift: int) -> int:
        """Return the sum over queries i of ``i + shift``, clamped to 0 and seqlen_kv."""
        queries, keys = self.seqlen_q, self.seqlen_kv
        begin = min(queries, max(0, -shift))  # before it the terms are 0
        end = min(queries, max(begin, keys - shift))  # from it on they are seqlen_kv
        between = (begin + end - 1 + 2 * shift) * (end - begin) // 2
        return between + keys * (queries - end)

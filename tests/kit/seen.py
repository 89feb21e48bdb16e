"""The queries and keys of a case that count, and the keys that a query sees."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["LENGTHS", "Seen", "lengths_of", "named_lengths"]

#: Arrays of used lengths, and their letters in a case.
LENGTHS = {"seqused_q": "q", "seqused_kv": "k"}


def named_lengths(used: str) -> dict[str, list[int] | None]:
    """The arrays of used lengths that ``Case.used`` names, and their contents if it has them.

    Raises
    ------
    ValueError
        If the text is not of this form.
    """
    if "/" not in used:
        if used not in ("", "q", "k", "qk"):
            raise ValueError(f"no such lengths: {used!r}")
        return {name: None for name, letter in LENGTHS.items() if letter in used}
    texts = zip(LENGTHS, used.split("/"), strict=True)
    return {name: [int(rows) for rows in text.split(",")] for name, text in texts if text}


def lengths_of(case: Any, name: str) -> np.ndarray:
    """The given lengths, or drawn ones: mostly in the middle, some 0, whole or beyond the end."""
    said = named_lengths(case.used)[name]
    if said is not None:
        return np.array(said, np.int32)
    generator = np.random.default_rng([case.seed, 105 + [*LENGTHS].index(name)])
    seqlen = case.seqlen_q if name == "seqused_q" else case.seqlen_kv
    some = generator.integers(0, seqlen + 1, case.batch)
    beyond = generator.choice([1, 2, 1000, 2**31 - 1 - seqlen], case.batch)
    odd = [np.zeros(case.batch), np.full(case.batch, seqlen), seqlen + beyond, -beyond]
    kind = generator.choice(12, case.batch)
    return np.choose(np.minimum(kind, 4), [*odd, some]).astype(np.int32)


class Seen:
    """The visible pairs of a case, for one batch entry at a time.

    Without used lengths all entries are equal, even if the batch is empty.
    """

    batch: int
    seqlen_q: int
    seqlen_kv: int
    causal: bool
    q_offset: int | None
    used: str
    sides: tuple[int | None, int | None]

    def counted(self, entry: int = 0) -> tuple[int, int]:
        """The number of queries and keys of an entry that count."""
        found = [self.seqlen_q, self.seqlen_kv]
        named = named_lengths(self.used) if self.batch else {}
        for axis, name in enumerate(LENGTHS):
            if name in named:
                found[axis] = min(max(int(lengths_of(self, name)[entry]), 0), found[axis])
        return found[0], found[1]

    def offset_of(self, entry: int = 0) -> int:
        """The q_offset of an entry, with the default filled in."""
        queries, keys = self.counted(entry)
        return keys - queries if self.q_offset is None else self.q_offset

    @property
    def offset(self) -> int:
        """The q_offset of every entry of a case without used lengths."""
        return self.offset_of()

    def visible_range(self, entry: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """The keys that each query sees, [begin, end), each (seqlen_q,); O(seqlen_q)."""
        queries, keys = self.counted(entry)
        own = np.arange(self.seqlen_q, dtype=np.int64) + self.offset_of(entry)
        left, right = self.sides
        if self.causal:
            right = 0 if right is None else min(right, 0)
        begin = np.zeros_like(own) if left is None else own - left
        end = np.full_like(own, keys) if right is None else own + right + 1
        begin, end = (np.clip(bound, 0, keys) for bound in (begin, end))
        begin[queries:] = end[queries:] = 0
        return begin, np.maximum(begin, end)

    def visible_ranges(self) -> tuple[np.ndarray, np.ndarray]:
        """The ranges of every entry, the same for all heads, each (batch, 1, seqlen_q)."""
        ranges = [self.visible_range(entry) for entry in range(self.batch)]
        found = np.array(ranges, np.int64).reshape(self.batch, 2, self.seqlen_q)
        return found[:, 0, None], found[:, 1, None]

    def visible(self, entry: int = 0) -> np.ndarray:
        """The number of keys that each query sees, (seqlen_q,)."""
        begin, end = self.visible_range(entry)
        return end - begin

    def sees(self, entry: int = 0) -> np.ndarray:
        """Whether each query sees each key, (seqlen_q, seqlen_kv)."""
        begin, end = self.visible_range(entry)
        keys = np.arange(self.seqlen_kv)
        return (keys >= begin[:, None]) & (keys < end[:, None])

    def distances(self, entry: int = 0) -> np.ndarray:
        """The distance from each query's own key to each key, (seqlen_q, seqlen_kv)."""
        own = np.arange(self.seqlen_q, dtype=np.int64) + self.offset_of(entry)
        return np.abs(own[:, None] - np.arange(self.seqlen_kv))

    def queries_count(self) -> np.ndarray:
        """Whether a query counts, (batch, seqlen_q)."""
        rows = np.arange(self.seqlen_q)
        counts = [rows < self.counted(entry)[0] for entry in range(self.batch)]
        return np.array(counts, bool).reshape(self.batch, self.seqlen_q)

    def keys_count(self) -> np.ndarray:
        """Whether a key counts, (batch, seqlen_kv)."""
        keys = np.arange(self.seqlen_kv)
        counts = [keys < self.counted(entry)[1] for entry in range(self.batch)]
        return np.array(counts, bool).reshape(self.batch, self.seqlen_kv)

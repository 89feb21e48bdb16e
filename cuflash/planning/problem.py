"""The problem that one call computes, without its arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..features.use import Operand, Use
from .elements import DTYPES, ELEMENTS, DType, DTypeName, Element, ElementName
from .visibility import MaskKind, Visibility

__all__ = [
    "DTYPES",
    "ELEMENTS",
    "MAX_HEADS",
    "MAX_HEAD_DIM",
    "MAX_SEQLEN",
    "Alignment",
    "AttentionProblem",
    "DType",
    "DTypeName",
    "Element",
    "ElementName",
    "MaskKind",
    "Operation",
]

Operation = Literal["forward", "backward"]
Alignment = Literal["tensor_map", "vector", "element"]

#: Widest head the kernels and the tiled NumPy code take.
MAX_HEAD_DIM = 256
#: Most heads of all batch entries together: the thread blocks that one launch may have.
MAX_HEADS = 2**31 - 1
#: Longest sequence. Positions are 32-bit in the kernels (offsets in memory are not). They include
#: rows of the last tile beyond the length, plus an offset of up to this many keys.
MAX_SEQLEN = 2**30 - 2**12

#: Smallest and largest normal number of float32.
_LEAST, _MOST = 2.0**-126, (2 - 2.0**-23) * 2.0**127


@dataclass(frozen=True)
class AttentionProblem:
    """One call of attention or of its gradient: everything but the data.

    Lengths and widths are in elements. ``mask`` says which bounds the keys of a
    query have: with "causal" and "band" the last key is ``i + q_offset`` for query
    i, with "left" and "band" the first key is ``i + q_first``. Both numbers are
    clamped to the range in which they matter, and are 0 if the mask has no such bound.
    ``alignment`` is "vector" if every row of every tensor starts at a multiple of
    16 bytes and has a multiple of 16 bytes, and "tensor_map" if in addition all
    strides are those of Hopper's copy engine: positive and below 2^40 bytes.
    ``uses`` holds the contributions of features, in the order of their table.
    ``wrt`` names the tensors whose gradients a backward pass computes; its order
    does not matter. ``block`` has the queries and keys of a block of a block mask,
    (0, 0) without one. ``sequences`` is the number of packed sequences, plus one for
    the rows after the last sequence; 0 without packed sequences. ``group_rows`` is
    the number of query heads that are rows of one query; then ``seqlen_q`` is that
    number, and ``heads_q`` is ``heads_kv``. ``pages`` has the number of pages of k and
    v, or of entries of caches, and the rows of each; (0, 0) if k and v have the
    entries and rows of the batch. ``float8`` says that k and v hold float8 numbers.
    ``most_queries`` is the most queries of an entry if queries are packed and keys are
    in caches; 0 otherwise.
    """

    operation: Operation
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_kv: int
    head_dim: int
    head_dim_v: int
    storage: DTypeName
    output: DTypeName
    mask: MaskKind
    scale: float
    q_offset: int
    alignment: Alignment = "vector"
    deterministic: bool = False
    q_first: int = 0
    uses: tuple[Use, ...] = ()
    wrt: tuple[str, ...] = ("q", "k", "v")
    block: tuple[int, int] = (0, 0)
    sequences: int = 0
    group_rows: int = 1
    pages: tuple[int, int] = (0, 0)
    float8: bool = False
    most_queries: int = 0

    @property
    def stored(self) -> ElementName:
        """Type of the elements of k and v."""
        return "uint8" if self.float8 else self.storage

    @property
    def page_size(self) -> int:
        """Keys of a page; 0 if all keys of an entry are in one page."""
        return self.pages[1] if 0 < self.pages[1] < self.seqlen_kv else 0

    def box_rows(self, block_kv: int) -> int:
        """Return the number of keys of a block that are adjacent in memory."""
        return min(self.page_size or block_kv, block_kv)

    @property
    def num_entries(self) -> int:
        """Entries of the batch that arrays of features have numbers for."""
        return self.sequences - 1 if self.most_queries else self.batch

    @property
    def batches(self) -> int:
        """Entries of the batch, or packed sequences."""
        return self.sequences or self.batch

    def tiles(self, length: int, rows: int) -> int:
        """Return the most tiles of ``rows`` rows that a head may have, for a total length.

        Every sequence may end in the middle of a tile.
        """
        return (length + (self.sequences or 1) * (rows - 1)) // rows

    @property
    def usual_lengths(self) -> tuple[int, int]:
        """Queries and keys of an entry, or their mean in packed sequences, to choose tiles by."""
        several = max(1, self.sequences - 1)
        keys = self.seqlen_kv if self.most_queries else -(-self.seqlen_kv // several)
        return -(-self.seqlen_q // several), keys

    @property
    def has_pairs(self) -> bool:
        """Whether the problem has a pair of a query and a key, hidden or not."""
        return self.batch * self.heads_q * self.seqlen_q * self.seqlen_kv > 0

    @property
    def has_last(self) -> bool:
        """Whether the mask has a last key for every query."""
        return self.mask in ("causal", "band")

    @property
    def has_first(self) -> bool:
        """Whether the mask has a first key for every query."""
        return self.mask in ("left", "band")

    @property
    def visibility(self) -> Visibility:
        """The keys that each query sees."""
        first = self.q_first if self.has_first else None
        last = self.q_offset if self.has_last else None
        return Visibility(self.seqlen_q, self.seqlen_kv, first, last)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features that the problem uses."""
        return tuple(use.feature for use in self.uses)

    @property
    def operands(self) -> dict[str, Operand]:
        """Arrays of the problem's features by name."""
        return {operand.name: operand for use in self.uses for operand in use.operands}

    @property
    def hides_tiles(self) -> bool:
        """Whether a mask may hide all pairs of some tiles."""
        mask = self.operands.get("mask")
        return "block_mask" in self.operands or (mask is not None and min(mask.pairs[2:]) > 1)

    @property
    def q_blocks(self) -> int:
        """Number of blocks along the queries of a block mask."""
        return -(-self.seqlen_q // self.block[0]) if self.block[0] else 1

    @property
    def kv_blocks(self) -> int:
        """Number of blocks along the keys of a block mask."""
        return -(-self.seqlen_kv // self.block[1]) if self.block[1] else 1

    @property
    def shares_pairs(self) -> bool:
        """Whether batch entries share an array that has a number for every pair."""
        pairs = (one.pairs for one in self.operands.values() if one.staged)
        return any(b < self.batch and rows > 1 and keys > 1 for b, _, rows, keys in pairs)

    @property
    def compute(self) -> DTypeName:
        """Type of the accumulators and of the softmax."""
        return DTYPES[self.storage].compute

    @property
    def statistics(self) -> DTypeName:
        """Type of the log-sum-exp that callers see."""
        return DTYPES[self.storage].compute

    @property
    def unit(self) -> float:
        """The natural value of one unit of the scores that enter the softmax."""
        return next((use.unit for use in self.uses[::-1] if use.unit is not None), self.scale)

    @property
    def factor(self) -> float:
        """The float32 factor of scores in the kernels, in log2 units for 16-bit storage.

        It is never 0 or infinite, which would turn a hidden score into NaN. Kernels of
        float64 multiply by :attr:`unit` instead.
        """
        log2_units = DTYPES[self.storage].itemsize == 2
        return min(max(self.unit * (math.log2(math.e) if log2_units else 1), _LEAST), _MOST)

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.heads_q // self.heads_kv if self.heads_kv else 1

    @property
    def shapes(self) -> dict[str, tuple[int, int, int, int]]:
        """Shape of every matrix by name: (batch, rows, heads, columns)."""
        q = (self.batch, self.seqlen_q, self.heads_q)
        entries, rows = self.pages if any(self.pages) else (self.batch, self.seqlen_kv)
        kv = (entries, rows, self.heads_kv)
        wide, narrow = ("q", "k", "dq", "dk"), ("v", "out", "dout", "dv")
        of_kv = ("k", "v", "dk", "dv")
        return {
            name: (*(kv if name in of_kv else q), width)
            for names, width in ((wide, self.head_dim), (narrow, self.head_dim_v))
            for name in names
        }

    @property
    def empty(self) -> bool:
        """Whether the call has nothing to compute or to write."""
        rows_q = self.batch * self.heads_q * self.seqlen_q
        if self.operation == "forward":
            return rows_q == 0
        rows_kv = self.batch * self.heads_kv * self.seqlen_kv
        arrays = any(0 not in o.shape for name, o in self.operands.items() if name in self.wrt)
        return rows_q == 0 and rows_kv == 0 and not arrays

    @property
    def flops(self) -> int:
        """Floating-point operations of the matrix products; half of all pairs if causal.

        This is the convention of the FlashAttention papers: 2 products forward, 5
        backward, without masked pairs.
        """
        pairs = self.batch * self.heads_q * self.seqlen_q * self.seqlen_kv
        if self.mask == "causal":
            pairs //= 2
        elif self.mask != "full":
            pairs = self.batch * self.heads_q * self.visibility.pairs
        if self.operation == "forward":
            return 2 * pairs * (self.head_dim + self.head_dim_v)
        return 2 * pairs * (3 * self.head_dim + 2 * self.head_dim_v)

    def __str__(self) -> str:
        heads = f"{self.heads_q}" if self.group == 1 else f"{self.heads_q}/{self.heads_kv}"
        dims = f"{self.head_dim}"
        if self.head_dim_v != self.head_dim:
            dims += f"/{self.head_dim_v}"
        offset = f" q_offset {self.q_offset}" if self.mask == "causal" else ""
        if self.has_first:
            last = f" to i{self.q_offset:+d}" if self.has_last else ""
            offset = f" keys i{self.q_first:+d}{last}"
        named = (use for use in self.uses if use.feature != "window")  # its bounds are in offset
        more = [
            use.shown or " ".join(f"{name} {value}" for name, value in use.numbers)
            for use in named
            if use.shown or use.numbers
        ]
        more += [f"{operand.name} {operand.dtype}" for operand in self.operands.values()]
        if self.wrt != ("q", "k", "v"):
            more.append(f"wrt {', '.join(self.wrt)}")
        return (
            f"{self.operation} {self.storage} batch {self.batch} heads {heads} "
            f"seqlen {self.seqlen_q}x{self.seqlen_kv} head_dim {dims} {self.mask}{offset}"
            f"{''.join(f' {what}' for what in more)}"
        )

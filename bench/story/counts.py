"""Bytes that the loops of the algorithms read and write for one head without a mask.

N is the length, d the width of q, k, v and out, and ``size`` the bytes of one of their elements.
FlashAttention-1 keeps O, l and m in float32. Caches are ignored: these are the loads and stores of
a kernel, each of which reaches device memory unless a cache holds it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..stored import Row
from .speed import STANDARD

__all__ = ["Traffic", "fa1_formula", "fa1_kernel", "of_row", "once", "standard_by_hand"]
__all__ += ["standard_paper", "tiled_rows"]

#: Bytes of an element of FlashAttention-1's O, l and m, and of a log-sum-exp.
FLOAT32 = 4
#: Bytes of an element of the rows: float16.
ELEMENT = 2


@dataclass(frozen=True)
class Traffic:
    """Bytes read and bytes written."""

    reads: int
    writes: int

    @property
    def total(self) -> int:
        """Bytes read and written together."""
        return self.reads + self.writes

    def times(self, count: int) -> Traffic:
        """The traffic of ``count`` heads."""
        return Traffic(count * self.reads, count * self.writes)


def _tiles(length: int, block: int) -> int:
    return -(-length // block)


def once(seqlen: int, head_dim: int, size: int) -> Traffic:
    """Every input read once, the output and the log-sum-exp written once: the least possible."""
    matrix = seqlen * head_dim * size
    return Traffic(3 * matrix, matrix + FLOAT32 * seqlen)


def fa1_formula(seqlen: int, head_dim: int, block_kv: int, size: int) -> Traffic:
    """Algorithm 1 of FlashAttention: ``2Nd*s + T_c (Nd*s + 8Nd + 16N) - (4Nd + 8N)``.

    s is ``size``. K and V are read once. Each of the T_c K/V blocks reads Q, and reads and
    writes O, l and m; the first block has no O, l and m to read, which the last term subtracts.
    """
    passes = _tiles(seqlen, block_kv)
    matrix = seqlen * head_dim * size
    state = FLOAT32 * seqlen * (head_dim + 2)
    return Traffic((2 + passes) * matrix + (passes - 1) * state, passes * state)


def fa1_kernel(seqlen: int, head_dim: int, block_kv: int, size: int) -> Traffic:
    """Our kernel of Algorithm 1: its last pass writes the rounded output and one number per row.

    That number is the log-sum-exp, which replaces l and m.
    """
    passes = _tiles(seqlen, block_kv)
    matrix = seqlen * head_dim * size
    state = FLOAT32 * seqlen * (head_dim + 2)
    return Traffic(
        (2 + passes) * matrix + (passes - 1) * state,
        (passes - 1) * state + matrix + FLOAT32 * seqlen,
    )


def standard_paper(seqlen: int, head_dim: int, size: int) -> Traffic:
    """Algorithm 0 of FlashAttention: S written and read, P written and read."""
    matrix, square = seqlen * head_dim * size, seqlen * seqlen * size
    return Traffic(3 * matrix + 2 * square, 2 * square + matrix)


def standard_by_hand(seqlen: int, head_dim: int, size: int) -> Traffic:
    """Standard attention as a user writes it in CuPy, with one kernel for each operation.

    CuPy multiplies batches of 16-bit matrices in float32: each operand is
    widened first, and the product rounded. Between the two products, six kernels read
    the N x N matrix (scale, maximum, subtraction, exponential, sum and division), and
    all but the maximum and the sum write it. The maxima and the sums are N numbers
    each, written once and read once.
    """
    matrix, square, column = seqlen * head_dim, seqlen * seqlen, seqlen
    wide = FLOAT32
    first = Traffic(
        2 * matrix * (size + wide) + square * wide,
        2 * matrix * wide + square * (wide + size),
    )
    between = Traffic(6 * square * size + 2 * column * size, 4 * square * size + 2 * column * size)
    second = Traffic(
        (square + matrix) * (size + wide) + matrix * wide,
        square * wide + 2 * matrix * wide + matrix * size,
    )
    parts = (first, between, second)
    return Traffic(sum(part.reads for part in parts), sum(part.writes for part in parts))


def tiled_rows(seqlen: int, head_dim: int, block_q: int, size: int) -> Traffic:
    """FlashAttention-2 and 3: every q tile reads all of K and V, and writes its rows once."""
    matrix = seqlen * head_dim * size
    passes = _tiles(seqlen, block_q)
    return Traffic((1 + 2 * passes) * matrix, matrix + FLOAT32 * seqlen)


def of_row(row: Row) -> dict[str, int]:
    """Bytes of all heads of a row of the part io; empty if its blocks are not known.

    ``count_read`` and ``count_write`` are the kernel's bytes. Names with ``paper`` are the paper's
    bytes, and names with ``once`` the least possible.
    """
    seqlen, dim, blocks = row["seqlen"], row["head_dim"], row["blocks"]
    if row["label"] == STANDARD:
        count = standard_by_hand(seqlen, dim, ELEMENT)
        paper = standard_paper(seqlen, dim, ELEMENT)
    elif not blocks:
        return {}
    elif row["label"] == "cuflash fa1":
        count = fa1_kernel(seqlen, dim, blocks[1], ELEMENT)
        paper = fa1_formula(seqlen, dim, blocks[1], ELEMENT)
    else:
        count = paper = tiled_rows(seqlen, dim, blocks[0], ELEMENT)
    found = {}
    least = once(seqlen, dim, ELEMENT)
    for name, of_head in (("count", count), ("paper", paper), ("once", least)):
        traffic = of_head.times(row["heads"])
        found |= {f"{name}_read": traffic.reads, f"{name}_write": traffic.writes}
    return found

"""The tables of FlashAttention-2: tiles to choose from, best first, by bytes of an element.

The first row that fits and allows the sequence length is taken. The rows with a
figure were the fastest on an H200 (TFLOP/s of the stored run, full, at seqlen 8192
in bfloat16 and 4096 in the others, unless a row names another); the rows after them
are for less shared memory and for few blocks.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "BACKWARD",
    "FEW_BUCKETS",
    "FORWARD",
    "FORWARD_OF_FEW",
    "BackwardRow",
    "ForwardFewRow",
    "ForwardRow",
]


class ForwardRow(NamedTuple):
    """A tile of the forward pass for head dims above ``wider_than`` and up to ``widest``."""

    widest: int
    block_q: int
    block_kv: int
    warps: int
    blocks_per_sm: int = 1
    maxima_on_demand: bool = False  # fewer instructions a step, more code
    shortest: int = 0  # smallest seqlen_kv; a cache that grows past it compiles one more kernel
    paired: bool = False  # two warps share rows: half of the keys and of the columns each
    num_stages: int = 2  # of K and V
    wider_than: int = 0


class BackwardRow(NamedTuple):
    """A tile of the backward pass for head dims up to ``widest``."""

    widest: int
    block_q: int
    block_kv: int
    warps: int
    blocks_per_sm: int
    num_stages: int  # of Q and dO
    score_stages: int  # of P and dS; with two, scores run beside gradients
    transposed: bool = False  # scores as keys x queries: P and dS are operands in registers


FORWARD = {
    2: (
        ForwardRow(64, 128, 64, 4, 2, True, 1536),  # 374 at 64
        ForwardRow(64, 128, 64, 4, 3),  # 284 at 64 and seqlen 512
        ForwardRow(128, 128, 64, 4, 2, True, 1024),  # 434 at 128
        ForwardRow(128, 128, 64, 4, 2),  # 336 at 128 and seqlen 512
        ForwardRow(192, 64, 64, 4, 2, num_stages=1, wider_than=128),  # a single run, bench/NOTES.md
        ForwardRow(256, 128, 64, 8, paired=True, shortest=1024, wider_than=192),  # 354 at 256
        ForwardRow(256, 64, 64, 4, 2, num_stages=1, wider_than=192),  # 285 at 256 and seqlen 512
        ForwardRow(256, 128, 64, 8),  # if those above do not fit
        ForwardRow(256, 64, 64, 4),
        ForwardRow(256, 64, 32, 4),
        ForwardRow(256, 32, 32, 2),
        ForwardRow(256, 32, 16, 2),
        ForwardRow(256, 16, 16, 1),
    ),
    4: (
        ForwardRow(128, 128, 64, 8),  # 58 at 64, 59 at 128
        ForwardRow(256, 64, 32, 4),
        ForwardRow(256, 64, 16, 4),
        ForwardRow(256, 32, 16, 2),
        ForwardRow(256, 32, 16, 4),
        ForwardRow(256, 16, 16, 1),
        ForwardRow(256, 16, 16, 2),
        ForwardRow(256, 16, 8, 1),
        ForwardRow(256, 8, 8, 1),
    ),
    8: (
        ForwardRow(64, 128, 32, 8),  # 37 at 64
        ForwardRow(128, 128, 16, 8),  # 42 at 128
        ForwardRow(256, 64, 16, 4),
        ForwardRow(256, 32, 16, 4),
        ForwardRow(256, 32, 16, 2),
        ForwardRow(256, 16, 16, 2),
        ForwardRow(256, 16, 8, 2),
        ForwardRow(256, 16, 8, 1),
        ForwardRow(256, 8, 8, 1),
    ),
}

BACKWARD = {
    2: (
        BackwardRow(64, 32, 128, 4, 2, 3, 2, True),  # 326 at 64
        BackwardRow(128, 64, 128, 8, 1, 3, 2),  # 364 at 128
        BackwardRow(128, 64, 128, 8, 1, 2, 1),
        BackwardRow(192, 64, 64, 8, 1, 3, 2),
        BackwardRow(256, 32, 64, 8, 1, 3, 2),  # 256 at 256
        BackwardRow(256, 64, 64, 8, 1, 2, 1),
        BackwardRow(256, 64, 64, 8, 1, 1, 1),
        BackwardRow(256, 32, 64, 8, 1, 2, 1),
        BackwardRow(256, 32, 64, 8, 1, 1, 1),
        BackwardRow(256, 32, 32, 8, 1, 1, 1),  # with four warps the accumulators spill
        BackwardRow(256, 16, 32, 8, 1, 1, 1),
        BackwardRow(256, 16, 16, 2, 1, 1, 1),
        BackwardRow(256, 16, 16, 1, 1, 1, 1),
    ),
    4: (
        BackwardRow(64, 64, 128, 8, 1, 2, 1),  # 58 at 64
        BackwardRow(128, 64, 64, 8, 1, 2, 1),  # 59 at 128
        BackwardRow(256, 32, 64, 8, 1, 2, 1),
        BackwardRow(256, 32, 64, 8, 1, 1, 1),
        BackwardRow(256, 32, 32, 8, 1, 2, 1),
        BackwardRow(256, 32, 32, 8, 1, 1, 1),
        BackwardRow(256, 16, 32, 8, 1, 1, 1),
        BackwardRow(256, 16, 32, 4, 1, 1, 1),
        BackwardRow(256, 16, 16, 4, 1, 1, 1),
        BackwardRow(256, 16, 16, 2, 1, 1, 1),
        BackwardRow(256, 16, 16, 1, 1, 1, 1),
        BackwardRow(256, 8, 8, 4, 1, 1, 1),
        BackwardRow(256, 8, 8, 2, 1, 1, 1),
        BackwardRow(256, 8, 8, 1, 1, 1, 1),
    ),
    8: (
        BackwardRow(64, 32, 128, 8, 1, 1, 1),  # 40 at 64
        BackwardRow(64, 32, 64, 8, 1, 2, 1),
        BackwardRow(128, 32, 64, 8, 1, 1, 1),  # 43 at 128
        BackwardRow(256, 32, 32, 8, 1, 1, 1),
        BackwardRow(256, 16, 32, 8, 1, 1, 1),
        BackwardRow(256, 16, 32, 4, 1, 1, 1),
        BackwardRow(256, 16, 16, 4, 1, 1, 1),
        BackwardRow(256, 16, 16, 2, 1, 1, 1),
        BackwardRow(256, 16, 16, 1, 1, 1, 1),
        BackwardRow(256, 8, 8, 4, 1, 1, 1),
        BackwardRow(256, 8, 8, 2, 1, 1, 1),
        BackwardRow(256, 8, 8, 1, 1, 1, 1),
    ),
}

#: Widths that the kernel for few queries is compiled for.
FEW_BUCKETS = (64, 128, 192, 256)


class ForwardFewRow(NamedTuple):
    """A tile of the forward pass for few queries, for head dims up to ``widest``."""

    widest: int
    block_kv: int  # keys of a step of a warp
    warps: int
    most_slots: int  # of K and V by turns, for each warp; fewer where memory is short
    most_rows: int = 16  # of queries of several heads


#: By bytes of a stored number.
FORWARD_OF_FEW = {
    1: (
        ForwardFewRow(64, 32, 8, 12, 32),
        ForwardFewRow(128, 32, 8, 6, 32),
        ForwardFewRow(192, 16, 8, 8),
        ForwardFewRow(256, 16, 8, 6),
        ForwardFewRow(256, 16, 4, 6),
    ),
    2: (
        ForwardFewRow(64, 32, 8, 6, 32),
        ForwardFewRow(128, 16, 8, 6, 32),
        ForwardFewRow(192, 16, 8, 4),
        ForwardFewRow(256, 16, 8, 3),
        ForwardFewRow(256, 16, 4, 6),
    ),
}

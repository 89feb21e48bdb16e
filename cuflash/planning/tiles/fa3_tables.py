"""The tiles of FlashAttention-3, best first.

The first row whose widths and lengths allow the problem is taken. A figure is the speed
of the row on an H200 (TFLOP/s of the stored run, bfloat16, taking turns).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..problem import AttentionProblem

__all__ = [
    "BACKWARD",
    "BACKWARD_OF_FEW",
    "BACKWARD_OF_SHORT",
    "BUCKETS",
    "FORWARD",
    "FORWARD_OF_BLOCKS",
    "FORWARD_OF_FEW",
    "FORWARD_OF_FLOAT8",
    "FORWARD_WITH_PAIRS",
    "BackwardRow",
    "FewRow",
    "ForwardRow",
    "PairsRow",
    "ShortRow",
    "forward_rows",
    "is_reckoned",
]

#: Widths that kernels are compiled for: the possible numbers of columns of a product.
BUCKETS = (32, 64, 80, 96, 112, 128, 160, 192, 256)

#: Longer than any sequence.
_ANY = 1 << 62


class ForwardRow(NamedTuple):
    """A tile of the forward pass for head dims up to ``widest`` and ``widest_v``."""

    widest: int
    widest_v: int
    block_q: int  # 64 for each warpgroup that computes
    block_kv: int
    num_stages: int  # of K and of V
    q_stages: int  # with two, the next tile's Q is loaded before this tile ends
    takes_turns: bool = True  # warpgroups issue their products one after the other
    longest: int = _ANY  # largest seqlen_kv, without a mask
    longest_causal: int = _ANY
    widest_window: int = 0  # most keys of a window; then any length is allowed
    blocks_per_sm: int = 1
    step: float = 0.0  # microseconds on an H200, one block on a multiprocessor; 0: not measured
    step_beside: float = 0.0  # the same with ``blocks_per_sm`` blocks on a multiprocessor
    stored_stages: int = 0  # of the float8 bytes of K and V


FORWARD = (
    ForwardRow(64, 64, 256, 64, 4, 2, True, 2048, 0, step=0.88),  # 588 at 64, seqlen 2048 full
    # 501 at 64, seqlen 2048 causal
    ForwardRow(64, 64, 256, 64, 4, 2, False, 0, 2048, 1280, step=0.88),
    ForwardRow(64, 64, 192, 128, 3, 2, step=1.31),  # 656 at 64, seqlen 8192 full
    # 643 at 80 and 705 at 96, seqlen 8192 causal
    ForwardRow(96, 96, 192, 96, 2, 2, step=1.16),
    ForwardRow(128, 128, 128, 64, 4, 2, True, 0, 512, step=0.8),  # 353 at 128, seqlen 512 causal
    # 551 at 128, seqlen 512 full
    ForwardRow(128, 128, 128, 128, 2, 2, True, 1024, 1024, step=1.38),
    ForwardRow(128, 128, 192, 80, 2, 2, step=1.15),  # 800 at 128, seqlen 8192 full
    ForwardRow(192, 128, 128, 128, 2, 1, step=1.54),  # 796 at 192/128, seqlen 8192 causal
    ForwardRow(192, 192, 128, 96, 2, 1, step=1.38),  # 797 at 192, seqlen 8192 causal
    ForwardRow(256, 256, 128, 64, 2, 1, step=1.19),  # 840 at 256, seqlen 8192 full
)


#: Rows for few queries: several small blocks on a multiprocessor keep the memory busy.
FORWARD_OF_FEW = (
    ForwardRow(64, 64, 64, 64, 3, 1, blocks_per_sm=3, step=0.48, step_beside=0.84),
    ForwardRow(64, 64, 64, 128, 2, 1, blocks_per_sm=2, step=0.84, step_beside=1.12),
    ForwardRow(64, 64, 128, 128, 3, 2, step=1.17),
    ForwardRow(128, 128, 64, 64, 2, 1, blocks_per_sm=2, step=0.67, step_beside=0.92),
    ForwardRow(128, 128, 64, 128, 2, 1, step=1.12),
    ForwardRow(256, 256, 64, 64, 2, 1, step=0.96),
)


#: Rows for float8 caches and any number of queries. Times of steps are estimated, not measured:
#: see "Float8 caches" in ``bench/NOTES.md``.
FORWARD_OF_FLOAT8 = (
    ForwardRow(64, 64, 64, 64, 2, 1, blocks_per_sm=3, step=0.6, step_beside=0.9, stored_stages=6),
    ForwardRow(128, 128, 64, 64, 2, 1, blocks_per_sm=2, step=0.9, step_beside=1.2, stored_stages=3),
    ForwardRow(128, 128, 64, 128, 2, 1, step=1.6, stored_stages=4),
    ForwardRow(256, 256, 64, 64, 2, 1, step=1.6, stored_stages=3),
)


#: Rows for block masks: taken if their tile divides the mask's blocks.
FORWARD_OF_BLOCKS = (
    ForwardRow(64, 64, 128, 128, 3, 2),
    ForwardRow(64, 64, 128, 64, 4, 2),
    ForwardRow(96, 96, 128, 128, 2, 2),
    ForwardRow(96, 96, 128, 64, 4, 2),
    ForwardRow(128, 128, 128, 128, 2, 2),
    ForwardRow(128, 128, 128, 64, 4, 2),
    ForwardRow(192, 128, 128, 128, 2, 1),
    ForwardRow(192, 192, 128, 64, 2, 1),
    ForwardRow(256, 256, 128, 64, 2, 1),
)


def forward_rows(problem: AttentionProblem, every: bool = False) -> Iterator[ForwardRow]:
    """Yield the rows for a forward pass, best first; with ``every`` those for other lengths too."""
    if problem.float8:
        yield from (row for row in FORWARD_OF_FLOAT8 if _holds(row, problem))
        return
    yield from _rows_of_blocks(problem)
    for row in FORWARD:
        longest = row.longest if problem.mask == "full" else row.longest_causal
        narrow = problem.has_first and 0 < problem.visibility.most_keys <= row.widest_window
        square = problem.hides_tiles and row.block_q == row.block_kv
        fits = every or narrow or square or problem.usual_lengths[1] <= longest
        if fits and _holds(row, problem):
            yield row
    if every:
        yield from (row for row in FORWARD_OF_FEW if _holds(row, problem))


def is_reckoned(row: ForwardRow, problem: AttentionProblem) -> bool:
    """Return whether the time of a step is known: it was measured in heads of about this width."""
    widest = next(few.widest for few in FORWARD_OF_FEW if _holds(few, problem))
    return row.step > 0 and row.widest <= widest


def _rows_of_blocks(problem: AttentionProblem) -> Iterator[ForwardRow]:
    """Yield rows that divide a block mask's blocks, then rows that divide only their keys."""
    queries, keys = problem.block
    if not keys:
        return
    for divided in (queries, 0):
        for row in FORWARD_OF_BLOCKS:
            fits = divided % row.block_q == 0 and keys % row.block_kv == 0
            if fits and _holds(row, problem):
                yield row


def _holds(row: ForwardRow, problem: AttentionProblem) -> bool:
    return problem.head_dim <= row.widest and problem.head_dim_v <= row.widest_v


class PairsRow(NamedTuple):
    """A forward tile with stages for an array that has a number for every pair."""

    widest: int
    widest_v: int
    block_q: int
    block_kv: int
    num_stages: int
    pair_stages: int
    itemsize: int = 2  # of the array
    longest: int = _ANY

    @property
    def plain(self) -> ForwardRow:
        """The row of the tile without the array."""
        tile = self.block_q, self.block_kv, self.num_stages
        return ForwardRow(self.widest, self.widest_v, *tile, 1)


FORWARD_WITH_PAIRS = (
    PairsRow(64, 64, 256, 64, 4, 3, longest=1024),
    PairsRow(64, 64, 192, 128, 2, 2),
    PairsRow(128, 128, 128, 112, 2, 2),
    PairsRow(192, 192, 128, 64, 2, 2),
    PairsRow(256, 256, 128, 48, 2, 2),
    PairsRow(64, 64, 192, 64, 3, 2, 4),
    PairsRow(128, 128, 128, 64, 2, 2, 4),
    PairsRow(192, 192, 128, 64, 2, 2, 4),
    PairsRow(256, 256, 128, 48, 2, 1, 4),
)


#: Widest heads of both q and v in which every warpgroup has keys of its own.
_WIDEST_OF_OWN_KEYS = 128


class BackwardRow(NamedTuple):
    """A tile of the backward pass for head dims up to ``widest`` and ``widest_v``."""

    widest: int
    widest_v: int
    block_q: int
    block_kv: int  # 64 for each of the two warpgroups that compute, or 64 or 96 that they share
    num_stages: int  # of Q and dO
    kv_tiles_per_convert_block: int = 0  # 0: a separate kernel converts dQ
    zero_bytes: int = 4096  # bytes that one copy clears; they divide 16 rows of sums
    fewest_of_window: int = 0  # fewest keys of a window; 0: any mask
    stays_until: int = 0  # most steps of a kv tile for a block to compute several kv tiles
    halves_until: int = 0  # most q tiles, if the step of the last one may be half as long
    lengths: tuple[int, int] = (0, 0)  # fewest and most queries and keys of a plain pass; 0: any
    wider_than: int = 0  # both widths are wider; narrower ones are faster in a later row

    def allows(self, problem: AttentionProblem, every: bool) -> bool:
        """Return whether the row has a kernel for the widths and the features of a problem.

        Without ``every`` only if no later row has a faster one.
        """
        widths = problem.head_dim, problem.head_dim_v
        if self.block_kv < 128 and max(widths) <= _WIDEST_OF_OWN_KEYS:
            return False
        if self.block_kv % 64 and (problem.uses or problem.has_first):
            return False
        if not every and min(widths) <= self.wider_than:
            return False
        return widths[0] <= self.widest and widths[1] <= self.widest_v

    def takes(self, problem: AttentionProblem) -> bool:
        """Return whether the row is for the lengths of a problem."""
        fewest, most = self.lengths
        if self.block_kv % 64 and 96 < problem.seqlen_kv <= 128:
            return False  # as many tiles as of 64 keys, which are 1 to 6 % faster
        if not most:
            return True
        plain = not (problem.uses or problem.deterministic)
        shorter, longer = sorted((problem.seqlen_q, problem.seqlen_kv))
        return plain and fewest <= shorter and longer <= min(most, 2 * shorter)


BACKWARD = (
    BackwardRow(32, 32, 128, 128, 2, 0, 2048, stays_until=4),
    BackwardRow(64, 64, 128, 128, 2, 32, fewest_of_window=1024),  # 391 at 64, (512, 512)
    # The next: 1 to 2 % slower.
    BackwardRow(64, 64, 128, 128, 2, 16, halves_until=9, lengths=(256, 4096)),
    BackwardRow(64, 64, 128, 128, 2, halves_until=9),  # 570 at 64, seqlen 8192 full
    BackwardRow(96, 96, 64, 128, 2, 8, 2048),  # 547 at 96, seqlen 8192 causal
    BackwardRow(128, 128, 64, 128, 2, 8),  # 633 at 128, seqlen 8192 full
    BackwardRow(192, 128, 64, 128, 2, 0, 512),  # 508 at 192/128, seqlen 8192 causal
    BackwardRow(192, 192, 64, 96, 2, 0, 1024, wider_than=128),  # 1.20 times the next one's speed
    BackwardRow(192, 192, 64, 64, 2, 0, 1024),  # 480 at 192, seqlen 8192 causal
    BackwardRow(256, 256, 64, 64, 2, 0, 1024),  # 509 at 256, seqlen 8192 full
)


class FewRow(NamedTuple):
    """A tile of the backward pass for few queries, which a block keeps."""

    widest: int
    widest_v: int
    block_q: int
    block_kv: int  # 64 for each of two warpgroups that do arithmetic
    k_stages: int
    v_stages: int  # V is read at the beginning of a step, K until its end
    many: bool  # taken only with more kv tiles, over all heads, than multiprocessors


# 16 x 77 queries on 4096 keys in 8 heads: 129 us, the tile that keeps keys 258 us; at 128 wide
# 188 and 391 us. With one kv tile a head they are even.
BACKWARD_OF_FEW = (
    FewRow(64, 64, 128, 128, 3, 2, many=False),
    FewRow(128, 128, 128, 128, 2, 1, many=True),
)


class ShortRow(NamedTuple):
    """A tile of the backward pass for short heads, whose queries a block keeps."""

    widest: int
    widest_v: int
    q_tiles: int  # of 64 queries
    block_kv: int  # 64 for each of two warpgroups that do arithmetic
    kv_stages: int


BACKWARD_OF_SHORT = (
    ShortRow(32, 32, 4, 128, 2),
    ShortRow(64, 64, 4, 128, 2),
)

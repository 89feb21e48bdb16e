"""FlashAttention-3: tiles and the resources they need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

from ...features.use import Operand
from ..device import DeviceLimits
from ..problem import DTYPES, AttentionProblem
from ..step_time import StepTime
from . import fa3_lengths, fa3_registers
from .common import Arithmetic, Footprint, bucket, byte_panels, ceil_div
from .fa3_lengths import LengthsTile
from .fa3_tables import (
    BACKWARD,
    BUCKETS,
    FORWARD_WITH_PAIRS,
    ForwardRow,
    forward_rows,
    is_reckoned,
)
from .operand_tiles import NO_OPERAND, OperandTiles
from .panels import PANEL, panels

__all__ = [
    "ARITHMETIC",
    "ROWS",
    "Fa3BackwardTile",
    "Fa3ForwardTile",
    "Fa3Tile",
    "candidates",
    "tile_of_row",
]

#: Threads and rows of queries of a warpgroup.
WARPGROUP, ROWS = 128, 64

#: Rows of a tile of an array that is the same for all queries: one period of the swizzle.
_ROWS_OF_ONE = 8

#: The warpgroup's matrix instructions take 16 elements of depth.
ARITHMETIC = Arithmetic("tensor_cores", 16, 16)


@dataclass(frozen=True)
class Fa3ForwardTile:
    """The forward pass: warpgroups of 64 queries each, K and V in rings they share."""

    block_q: int
    block_kv: int
    num_stages: int
    q_stages: int
    takes_turns: bool
    head_dim: int
    head_dim_v: int
    operand: OperandTiles = NO_OPERAND
    blocks_per_sm: int = 1
    #: Stages of the float8 bytes of K and V before their conversion; 0 without float8 caches.
    stored_stages: int = 0
    step: StepTime | None = field(default=None, compare=False)

    @property
    def warpgroups(self) -> int:
        """Warpgroups that compute; one more loads."""
        return self.block_q // ROWS

    @property
    def footprint(self) -> Footprint:
        """Shared memory exactly as the kernel lays it out; the registers of the math role."""
        kv = panels(self.block_kv, self.head_dim) + panels(self.block_kv, self.head_dim_v)
        shared = self.q_stages * panels(self.block_q, self.head_dim) + self.num_stages * kv
        shared += 4 * self.warpgroups * panels(16, PANEL)  # of the output, a panel for each warp
        barriers = 2 * self.q_stages * self.warpgroups + 4 * self.num_stages + 4
        shared += 4 * self.num_stages + 48  # notes of listed tiles; the queue of tiles
        shared += 24 * self.stored_stages  # barriers, kind and number of rows of each stage
        shared = ceil_div(shared + 8 * barriers, 1024) * 1024 + self.operand.nbytes(self.block_kv)
        shared += self.stored_stages * byte_panels(self.block_kv, self.head_dim, self.head_dim_v)
        threads = WARPGROUP * (self.warpgroups + 1)
        registers = min(65536 // (threads * self.blocks_per_sm) // 8 * 8, 248)
        return Footprint(shared, registers, threads, self.blocks_per_sm)

    def constants(self) -> dict[str, int]:
        """Return the constants that the device code reads from ``Config``."""
        registers = fa3_registers.FORWARD[self.warpgroups, self.blocks_per_sm]
        return {
            "block_q": self.block_q,
            "block_kv": self.block_kv,
            "num_stages": self.num_stages,
            "q_stages": self.q_stages,
            "load_registers": registers.load,
            "math_registers": registers.math,
            "blocks_per_sm": self.blocks_per_sm,
            "takes_turns": int(self.takes_turns),
            **({"stored_stages": self.stored_stages} if self.stored_stages else {}),
            **self.operand.constants(),
        }


@dataclass(frozen=True)
class Fa3BackwardTile:
    """The backward pass: two warpgroups, which share the rings of Q and dO.

    Each has 64 keys, whose gradients stay in registers: a thread holds half as
    many numbers as K and V have columns. In wide heads the warpgroups share 64
    or 96 keys, and one has the gradients of K, the other those of V.
    """

    block_q: int
    block_kv: int
    num_stages: int
    head_dim: int
    head_dim_v: int
    ordered: bool = False  # kv tiles add to dQ in a fixed order
    #: Kv tiles for each block that converts sums of dQ; 0: a separate kernel converts them.
    kv_tiles_per_convert_block: int = 0
    #: Bytes that one copy clears.
    zero_bytes: int = 4096
    operand: OperandTiles = NO_OPERAND
    #: Whether a block computes several kv tiles, with two buffers of K and V.
    stays: bool = False
    stays_until: int = field(default=0, compare=False)  # most steps of a kv tile for that
    #: Whether half of the last q tile lies beyond the length, and its step leaves it out.
    half_last: bool = False
    halves_until: int = field(default=0, compare=False)  # most q tiles for that

    #: Warpgroups that compute.
    warpgroups = 2
    #: Stages of dS between the warpgroups.
    score_stages = 2

    @property
    def footprint(self) -> Footprint:
        """Shared memory exactly as the kernel lays it out; the registers of the math role."""
        parts = self._k_parts
        shared = parts * panels(self.block_kv, self.head_dim // parts)
        shared += panels(self.block_kv, self.head_dim_v)
        shared *= 1 + self.stays
        for columns in (self.head_dim, self.head_dim_v):
            shared += self.num_stages * panels(self.block_q, columns)
        shared += self.score_stages * panels(self.block_q, self.block_kv)
        if self.block_kv % ROWS:  # scores are queries x keys, and P lies beside dS
            shared += panels(self.block_q, self.block_kv)
        else:
            shared += 4 * self.warpgroups * panels(16, PANEL)  # of dK and dV, a panel for each warp
        shared += 2 * self.num_stages * 4 * self.block_q  # lse and delta
        barriers = 2 + 2 * self.num_stages + 2 * self.score_stages + 7 + 6 * self.stays
        shared += 4 * 16  # notes of listed steps
        shared = ceil_div(shared + 8 * barriers, 128) * 128 + self.zero_bytes
        shared = ceil_div(shared, 1024) * 1024 + self.operand.nbytes(self.block_kv)
        threads = WARPGROUP * (self.warpgroups + 1)
        return Footprint(shared, 65536 // threads // 8 * 8, threads)

    @property
    def shares_keys(self) -> bool:
        """Whether the warpgroups share the keys, as in wide heads."""
        return self.block_kv < self.warpgroups * ROWS

    @property
    def _k_parts(self) -> int:
        """Parts of K's columns: one for each warpgroup, if they divide keys but not rows of dQ."""
        return self.warpgroups if self.block_q == ROWS and not self.shares_keys else 1

    def constants(self, listed: bool = False) -> dict[str, int]:
        """Return the constants of ``Config`` for the device code, for listed or for all steps."""
        roomy = self.stays or (listed and (self.operand.stages or self.block_q > ROWS))
        registers = fa3_registers.LISTED_BACKWARD if roomy else fa3_registers.BACKWARD
        return {
            "block_q": self.block_q,
            "block_kv": self.block_kv,
            "num_stages": self.num_stages,
            "score_stages": self.score_stages,
            "kv_tiles_per_convert_block": self.kv_tiles_per_convert_block,
            "zero_bytes": self.zero_bytes,
            "fragment_rows": ARITHMETIC.fragment_rows,
            "ordered": int(self.ordered),
            "stays": int(self.stays),
            "half_last": int(self.half_last),
            "load_registers": registers.load,
            "math_registers": registers.math,
            **self.operand.constants(),
        }


Fa3Tile = Fa3ForwardTile | Fa3BackwardTile | LengthsTile


def tile_of_row(problem: AttentionProblem, row: ForwardRow) -> Fa3ForwardTile:
    """Return the tile of a row for the head dims of a problem."""
    step = StepTime(row.step, row.step_beside or row.step)
    return Fa3ForwardTile(
        row.block_q,
        row.block_kv,
        row.num_stages,
        row.q_stages,
        row.takes_turns,
        bucket(problem.head_dim, BUCKETS),
        bucket(problem.head_dim_v, BUCKETS),
        blocks_per_sm=row.blocks_per_sm,
        stored_stages=row.stored_stages,
        step=step if is_reckoned(row, problem) else None,
    )


def candidates(
    problem: AttentionProblem, limits: DeviceLimits, every: bool = False
) -> Iterator[Fa3Tile]:
    """Yield the tiles that fit the device, best first.

    With ``every`` also the tiles for other lengths.
    """
    forward = problem.operation == "forward"
    for tile in _forward(problem, every) if forward else _backward(problem, limits, every):
        if tile.footprint.excess(limits) is None and _has_whole_pages(problem, tile.block_kv):
            yield tile


def _has_whole_pages(problem: AttentionProblem, block_kv: int) -> bool:
    """Return whether ``block_kv`` keys are whole pages or divide a page, if keys are in pages."""
    size = problem.page_size
    return not size or size % block_kv == 0 or block_kv % size == 0


def _forward(problem: AttentionProblem, every: bool) -> Iterator[Fa3ForwardTile]:
    staged = _staged(problem)
    if staged is not None and staged.pairs[2] > 1:
        yield from _forward_with_pairs(problem, staged, every)
        return
    for row in forward_rows(problem, every):
        tile = tile_of_row(problem, row)
        yield from (tile,) if staged is None else _with_row(tile, staged)


def _forward_with_pairs(
    problem: AttentionProblem, staged: Operand, every: bool
) -> Iterator[Fa3ForwardTile]:
    for row in FORWARD_WITH_PAIRS:
        holds = problem.head_dim <= row.widest and problem.head_dim_v <= row.widest_v
        holds = holds and DTYPES[staged.dtype].itemsize == row.itemsize
        if holds and (every or problem.seqlen_kv <= row.longest):
            operand = OperandTiles(row.pair_stages, row.block_q, row.itemsize)
            yield replace(tile_of_row(problem, row.plain), operand=operand)


def _with_row(tile: Fa3ForwardTile, staged: Operand) -> Iterator[Fa3ForwardTile]:
    """Yield the tile with shared memory for an array that is the same for all queries."""
    operand = OperandTiles(2, _ROWS_OF_ONE, DTYPES[staged.dtype].itemsize)
    for stages in product(range(tile.num_stages, 1, -1), range(tile.q_stages, 0, -1)):
        yield replace(tile, num_stages=stages[0], q_stages=stages[1], operand=operand)


def _staged(problem: AttentionProblem) -> Operand | None:
    """Return the array of pairs that is loaded tile by tile."""
    every = problem.operands.values()
    return next((one for one in every if one.staged and one.mappable), None)


def _backward(
    problem: AttentionProblem, limits: DeviceLimits, every: bool
) -> Iterator[Fa3BackwardTile | LengthsTile]:
    few = [*fa3_lengths.tiles_of_lengths(problem)]
    first = [tile for tile in few if fa3_lengths.is_fastest(tile, problem, limits)]
    yield from first
    yield from _over_queries(problem, every)
    yield from (tile for tile in few if tile not in first)


def _over_queries(problem: AttentionProblem, every: bool) -> Iterator[Fa3BackwardTile]:
    window = problem.visibility.most_keys if problem.has_first else 0
    for row in BACKWARD:
        if not every and (window < row.fewest_of_window or not row.takes(problem)):
            continue
        if row.allows(problem, every):
            plain = Fa3BackwardTile(
                *(row.block_q, row.block_kv, row.num_stages, row.widest, row.widest_v),
                problem.deterministic,
                row.kv_tiles_per_convert_block,
                row.zero_bytes,
                stays_until=row.stays_until,
                halves_until=row.halves_until,
            )
            yield from _with_operand_of_rows(problem, plain)
            yield plain


def _with_operand_of_rows(
    problem: AttentionProblem, tile: Fa3BackwardTile
) -> Iterator[Fa3BackwardTile]:
    """Yield the tile with shared memory for an array of pairs.

    An array that is the same for all queries needs none: a lane reads two numbers of it.
    """
    staged = _staged(problem)
    if tile.shares_keys or staged is None or staged.pairs[2] == 1:
        return
    for stages in (2, 1):
        operand = OperandTiles(stages, tile.block_q, DTYPES[staged.dtype].itemsize)
        yield replace(tile, operand=operand)

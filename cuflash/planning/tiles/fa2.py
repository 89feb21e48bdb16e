"""FlashAttention-2: candidate tiles, best first, and the resources they need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..device import DeviceLimits
from ..problem import DTYPES, AttentionProblem, DTypeName
from .common import (
    Arithmetic,
    Footprint,
    arithmetics,
    bucket,
    key_step,
    shared_array,
    values_in_registers,
    warp_grid,
)
from .fa2_tables import BACKWARD, FORWARD, BackwardRow, ForwardRow
from .steps import ROWS

__all__ = [
    "Fa2BackwardTile",
    "Fa2ForwardTile",
    "Fa2Tile",
    "all_tiles",
    "candidates",
    "step_of",
    "tiles_of_blocks",
]


@dataclass(frozen=True)
class Fa2ForwardTile:
    """The forward pass: ``warps`` warps divide the rows, K and V stream through rings of stages.

    If warps are ``paired``, two warps share rows: each has half of a tile's
    keys and half of the output's columns.
    """

    block_q: int
    block_kv: int
    warps: int
    blocks_per_sm: int
    maxima_on_demand: bool  # row maxima are computed only if weights become too large
    paired: bool
    num_stages: int  # of K and V
    storage: DTypeName
    head_dim: int
    head_dim_v: int
    arithmetic: Arithmetic

    @property
    def footprint(self) -> Footprint:
        """Shared memory exactly as the kernel lays it out, registers as an estimate."""
        compute = DTYPES[self.storage].compute
        scalar = self.arithmetic.products == "scalar"
        shared = (
            shared_array(self.block_q * self.head_dim, self.storage)
            + self.num_stages * shared_array(self.block_kv * self.head_dim, self.storage)
            + self.num_stages * shared_array(self.block_kv * self.head_dim_v, self.storage)
            + shared_array(self.block_q * self.block_kv * (scalar or self.paired), self.storage)
            + (shared_array(2 * self.block_q, compute) if self.paired else 0)
        )
        sharing = 2 if self.paired else 1
        rows = self.block_q * sharing // self.warps
        held = values_in_registers(rows, self.head_dim_v // sharing, compute)
        held += values_in_registers(rows, self.block_kv // sharing, compute)
        return Footprint(shared, held + 56, 32 * self.warps, self.blocks_per_sm)

    def constants(self) -> dict[str, int]:
        """Return the constants that the device code reads from ``Config``."""
        return {
            "block_q": self.block_q,
            "block_kv": self.block_kv,
            "warps": self.warps,
            "maxima_on_demand": int(self.maxima_on_demand),
            "paired": int(self.paired),
            "num_stages": self.num_stages,
            "fragment_rows": self.arithmetic.fragment_rows,
        }


@dataclass(frozen=True)
class Fa2BackwardTile:
    """The backward pass: each kind of product has its own warp grid."""

    block_q: int
    block_kv: int
    warps: int
    blocks_per_sm: int
    num_stages: int  # of Q and dO
    score_stages: int  # of P and dS
    transposed: bool  # only dS goes through shared memory
    score_grid: tuple[int, int]
    kv_grid: tuple[int, int]
    q_grid: tuple[int, int]
    storage: DTypeName
    head_dim: int
    head_dim_v: int
    arithmetic: Arithmetic
    ordered: bool = False

    @property
    def footprint(self) -> Footprint:
        """Shared memory exactly as the kernel lays it out, registers as an estimate."""
        compute = DTYPES[self.storage].compute
        stage = (
            shared_array(self.block_q * self.head_dim, self.storage)
            + shared_array(self.block_q * self.head_dim_v, self.storage)
            + 2 * shared_array(self.block_q, compute)
        )
        shared = (
            shared_array(self.block_kv * self.head_dim, self.storage)
            + shared_array(self.block_kv * self.head_dim_v, self.storage)
            + self.num_stages * stage
            + self.score_stages * shared_array(self.block_q * self.block_kv, self.storage)
            + self.score_stages
            * shared_array(0 if self.transposed else self.block_q * self.block_kv, self.storage)
        )

        def part(rows: int, columns: int, grid: tuple[int, int]) -> int:
            return values_in_registers(rows // grid[0], columns // grid[1], compute)

        held = part(self.block_kv, self.head_dim + self.head_dim_v, self.kv_grid)
        passing = max(
            2 * part(self.block_q, self.block_kv, self.score_grid),
            part(self.block_q, self.head_dim, self.q_grid),
        )
        return Footprint(shared, held + passing + 56, 32 * self.warps, self.blocks_per_sm)

    def constants(self) -> dict[str, int]:
        """Return the constants that the device code reads from ``Config``."""
        return {
            "block_q": self.block_q,
            "block_kv": self.block_kv,
            "warps": self.warps,
            "num_stages": self.num_stages,
            "score_stages": self.score_stages,
            "transposed": int(self.transposed),
            "score_grid_rows": self.score_grid[0],
            "score_grid_columns": self.score_grid[1],
            "kv_grid_rows": self.kv_grid[0],
            "kv_grid_columns": self.kv_grid[1],
            "q_grid_rows": self.q_grid[0],
            "q_grid_columns": self.q_grid[1],
            "fragment_rows": self.arithmetic.fragment_rows,
            "ordered": int(self.ordered),
        }


Fa2Tile = Fa2ForwardTile | Fa2BackwardTile


def candidates(
    problem: AttentionProblem, limits: DeviceLimits, every: bool = False
) -> Iterator[Fa2Tile]:
    """Yield the tiles that the plan chooses from, best first, whether they fit or not.

    With ``every`` also the tiles for narrower heads.
    """
    itemsize = DTYPES[problem.storage].itemsize
    width = max(bucket(problem.head_dim), bucket(problem.head_dim_v))
    if problem.operation == "forward":
        for row in FORWARD[itemsize]:
            wide = row.wider_than < width <= row.widest
            if every or (wide and problem.usual_lengths[1] >= row.shortest):
                yield from _forward(problem, limits, row)
    else:
        for back in BACKWARD[itemsize]:
            if every or width <= back.widest:
                yield from _backward(problem, limits, back)


def tiles_of_blocks(
    problem: AttentionProblem, limits: DeviceLimits, block_q: int, block_kv: int
) -> Iterator[Fa2Tile]:
    """Yield every way of dividing these blocks among warps, best first.

    Maxima are on demand if the type allows it, whatever the length: explicit blocks
    are for comparisons of tiles.
    """
    for warps in (8, 4, 2, 1):
        if problem.operation == "forward":
            on_demand = DTYPES[problem.storage].itemsize == 2
            row = ForwardRow(256, block_q, block_kv, warps, 1, on_demand)
            yield from _forward(problem, limits, row)
            continue
        for stages in ((3, 2), (2, 1), (1, 1)):
            wide = BackwardRow(256, block_q, block_kv, warps, 1, *stages)
            yield from _backward(problem, limits, wide)


def all_tiles(problem: AttentionProblem, limits: DeviceLimits) -> Iterator[Fa2Tile]:
    """Yield every possible tile up to 256 rows, whether it fits or not."""
    step = step_of(problem, limits)
    for block_q in range(step, 257, step):
        for block_kv in range(step, 257, step):
            yield from tiles_of_blocks(problem, limits, block_q, block_kv)


def step_of(problem: AttentionProblem, limits: DeviceLimits) -> int:
    """Return the smallest block; every block is a multiple of it."""
    rows = min(a.fragment_rows for a in arithmetics(problem.storage, limits.compute_capability))
    return max(rows, key_step(problem.storage))


def _forward(
    problem: AttentionProblem, limits: DeviceLimits, row: ForwardRow
) -> Iterator[Fa2ForwardTile]:
    for arithmetic in arithmetics(problem.storage, limits.compute_capability):
        sharing = 2 if row.paired else 1
        whole_rows = row.block_q * sharing % (row.warps * arithmetic.fragment_rows) == 0
        halves = row.block_kv, bucket(problem.head_dim_v)
        whole = all(n % (sharing * key_step(problem.storage)) == 0 for n in halves)
        if row.paired and arithmetic.products == "scalar":
            continue
        if whole_rows and whole:
            yield Fa2ForwardTile(
                row.block_q,
                row.block_kv,
                row.warps,
                row.blocks_per_sm,
                row.maxima_on_demand,
                row.paired,
                row.num_stages,
                problem.storage,
                bucket(problem.head_dim),
                bucket(problem.head_dim_v),
                arithmetic,
            )


def _backward(
    problem: AttentionProblem, limits: DeviceLimits, row: BackwardRow
) -> Iterator[Fa2BackwardTile]:
    if ROWS % row.block_q:  # the last tile would reach into the next head's rows of the workspace
        return
    head_dim, head_dim_v = bucket(problem.head_dim), bucket(problem.head_dim_v)
    for arithmetic in arithmetics(problem.storage, limits.compute_capability):
        units = arithmetic.fragment_rows, key_step(problem.storage)
        score_grid = warp_grid(row.block_q, (row.block_kv,), row.warps, *units)
        kv_grid = warp_grid(row.block_kv, (head_dim, head_dim_v), row.warps, *units)
        if row.transposed:
            if row.block_kv % (row.warps * arithmetic.fragment_rows):
                continue
            kv_grid = (row.warps, 1)
        q_grid = warp_grid(row.block_q, (head_dim,), row.warps, *units)
        if score_grid is None or kv_grid is None or q_grid is None:
            continue
        yield Fa2BackwardTile(
            *row[1:],
            score_grid,
            kv_grid,
            q_grid,
            problem.storage,
            head_dim,
            head_dim_v,
            arithmetic,
            problem.deterministic,
        )

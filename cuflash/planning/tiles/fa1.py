"""FlashAttention-1: tiles from the paper's rule, and the resources they need.

Dao et al. 2022, Algorithm 1, line 1: ``B_c = ceil(M / 4d)``, ``B_r = min(B_c, d)``
with M the on-chip memory in elements, which K, V, Q and O share equally. Here O is
float32, and row statistics, scratch and a warp's scores need memory too. So blocks start
at the rule's size, in whole matrix instructions, and shrink until everything fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..device import DeviceLimits
from ..problem import DTYPES, AttentionProblem, DTypeName
from .common import (
    Arithmetic,
    Footprint,
    arithmetics,
    bucket,
    ceil_div,
    fragment_row_choices,
    key_step,
    shared_array,
    values_in_registers,
    warp_grid,
)

__all__ = [
    "BLOCK_KV_CAP",
    "Fa1BackwardTile",
    "Fa1ForwardTile",
    "Fa1Tile",
    "all_tiles",
    "arithmetic",
    "paper_blocks",
    "steps_of",
    "tiles_of_blocks",
    "tiles_of_rule",
]

#: Most keys of a tile. The rule gives thousands at head_dim 8, but more keys
#: save nothing there: the O tile's traffic is already small beside Q's.
BLOCK_KV_CAP = 512


@dataclass(frozen=True)
class Fa1ForwardTile:
    """The forward pass: ``warps_q x warps_kv`` warps divide a block_q x block_kv score tile."""

    block_q: int
    block_kv: int
    warps_q: int
    warps_kv: int
    fragment_rows: int
    storage: DTypeName
    head_dim: int
    head_dim_v: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps_q * self.warps_kv

    @property
    def footprint(self) -> Footprint:
        """Shared memory exactly as the kernel lays it out, registers as an estimate."""
        compute = DTYPES[self.storage].compute
        scalar = self.storage in ("float32", "float64")
        rows = self.block_q // self.warps_q
        partial = self.warps_kv * rows * self.head_dim_v if self.warps_kv > 1 else 0
        row_group = (
            shared_array(rows * self.head_dim, self.storage)
            + shared_array(rows * self.head_dim_v, compute)
            + shared_array(partial, compute)
            + shared_array(rows * self.block_kv if scalar else 0, self.storage)
            + 2 * shared_array(self.warps_kv * rows, compute)
        )
        shared = (
            shared_array(self.block_kv * self.head_dim, self.storage)
            + shared_array(self.block_kv * self.head_dim_v, self.storage)
            + self.warps_q * row_group
        )
        scores = values_in_registers(rows, self.block_kv // self.warps_kv, compute)
        output = values_in_registers(rows, self.head_dim_v, compute)
        other = _OTHER_REGISTERS["forward", self.storage]
        other += 16 if self.head_dim % 64 else 0  # these rows need more address registers
        smallest = (self.block_q, self.block_kv) == (self.fragment_rows, key_step(self.storage))
        most = 255 if smallest else 999  # the smallest tile is always allowed, and may spill
        return Footprint(shared, min(scores + output + other, most), self.threads)

    def constants(self) -> dict[str, int]:
        """Return the constants that the device code reads from ``Config``."""
        return {
            "block_q": self.block_q,
            "block_kv": self.block_kv,
            "warps_q": self.warps_q,
            "warps_kv": self.warps_kv,
            "fragment_rows": self.fragment_rows,
        }


@dataclass(frozen=True)
class Fa1BackwardTile:
    """The backward pass: each kind of product has its own warp grid."""

    block_q: int
    block_kv: int
    warps: int
    score_grid: tuple[int, int]
    kv_grid: tuple[int, int]
    q_grid: tuple[int, int]
    num_stages: int
    fragment_rows: int
    storage: DTypeName
    head_dim: int
    head_dim_v: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def footprint(self) -> Footprint:
        """Shared memory exactly as the kernel lays it out, registers as an estimate."""
        compute = DTYPES[self.storage].compute
        shared = (
            shared_array(self.block_kv * self.head_dim, self.storage)
            + shared_array(self.block_kv * self.head_dim_v, self.storage)
            + self.num_stages * shared_array(self.block_q * self.head_dim, self.storage)
            + self.num_stages * shared_array(self.block_q * self.head_dim_v, self.storage)
            + 2 * shared_array(self.block_q * self.block_kv, self.storage)
        )

        def part(rows: int, columns: int, grid: tuple[int, int]) -> int:
            return values_in_registers(rows // grid[0], columns // grid[1], compute)

        held = part(self.block_kv, self.head_dim + self.head_dim_v, self.kv_grid)
        passing = max(
            2 * part(self.block_q, self.block_kv, self.score_grid),
            part(self.block_q, self.head_dim, self.q_grid),
        )
        other = _OTHER_REGISTERS["backward", self.storage]
        return Footprint(shared, held + passing + other, self.threads)

    def constants(self) -> dict[str, int]:
        """Return the constants that the device code reads from ``Config``."""
        return {
            "block_q": self.block_q,
            "block_kv": self.block_kv,
            "warps": self.warps,
            "score_grid_rows": self.score_grid[0],
            "score_grid_columns": self.score_grid[1],
            "kv_grid_rows": self.kv_grid[0],
            "kv_grid_columns": self.kv_grid[1],
            "q_grid_rows": self.q_grid[0],
            "q_grid_columns": self.q_grid[1],
            "num_stages": self.num_stages,
            "fragment_rows": self.fragment_rows,
        }


Fa1Tile = Fa1ForwardTile | Fa1BackwardTile


#: Registers besides the tiles: addresses, row statistics, temporary operands. The numbers follow
#: the use that ptxas reports: a lower one spills, a higher one gives smaller tiles.
_OTHER_REGISTERS = {
    ("forward", "float16"): 80,
    ("forward", "bfloat16"): 80,
    ("forward", "float32"): 112,
    ("forward", "float64"): 108,
    ("backward", "float16"): 96,
    ("backward", "bfloat16"): 96,
    ("backward", "float32"): 108,
    ("backward", "float64"): 128,
}


def paper_blocks(problem: AttentionProblem, limits: DeviceLimits) -> tuple[int, int]:
    """Return ``(B_r, B_c)`` of Algorithm 1, line 1, with d the mean of the head dims' buckets."""
    elements = limits.shared_per_block // DTYPES[problem.storage].itemsize
    head_dim, head_dim_v = bucket(problem.head_dim), bucket(problem.head_dim_v)
    block_kv = ceil_div(elements, 2 * (head_dim + head_dim_v))
    return min(block_kv, head_dim), block_kv


def tiles_of_rule(problem: AttentionProblem, limits: DeviceLimits) -> Iterator[Fa1Tile]:
    """Yield candidates in order of preference: the rule's blocks, then smaller and smaller tiles.

    A tile with more pairs comes first, since its operands are loaded once for all
    of them. If two tiles have as many pairs, the one with more keys comes first,
    since O is loaded and stored for every kv tile.
    """
    _, rule = paper_blocks(problem, limits)
    for rows in fragment_row_choices(problem.storage):
        step = max(rows, key_step(problem.storage))
        most = _blocks_to(min(rule, BLOCK_KV_CAP), step)
        blocks = [
            (block_q, block_kv)
            for block_kv in most
            for block_q in _blocks_to(min(block_kv, bucket(problem.head_dim)), step)
        ]
        for block_q, block_kv in sorted(blocks, key=lambda b: (b[0] * b[1], b[1]), reverse=True):
            yield from _tiles(problem, block_q, block_kv, rows)


def _blocks_to(limit: int, step: int) -> list[int]:
    """Return multiples of a step up to a limit, at least one; from four steps on even multiples.

    An even number can be divided among warps in more ways.
    """
    blocks = range(step, max(limit, step) + 1, step)
    return [block for block in blocks if block < 4 * step or block % (2 * step) == 0]


def tiles_of_blocks(problem: AttentionProblem, block_q: int, block_kv: int) -> Iterator[Fa1Tile]:
    """Yield every way of dividing these blocks among warps, best first."""
    for rows in fragment_row_choices(problem.storage):
        yield from _tiles(problem, block_q, block_kv, rows)


def all_tiles(problem: AttentionProblem) -> Iterator[Fa1Tile]:
    """Yield every possible tile, whether it fits or not."""
    for rows in fragment_row_choices(problem.storage):
        step = max(rows, key_step(problem.storage))
        for block_q in range(step, BLOCK_KV_CAP + 1, step):
            for block_kv in range(step, BLOCK_KV_CAP + 1, step):
                yield from _tiles(problem, block_q, block_kv, rows)


def arithmetic(storage: DTypeName, capability: tuple[int, int], fragment_rows: int) -> Arithmetic:
    """Return tensor cores for 16-bit products, and fused multiply-adds for the others."""
    best = arithmetics(storage, capability)[0]
    if best.products == "tensor_cores":
        return best
    return Arithmetic("scalar", 0, fragment_rows)


def steps_of(problem: AttentionProblem) -> int:
    """Return the smallest block; every block is a multiple of it."""
    rows = fragment_row_choices(problem.storage)[-1]
    return max(rows, key_step(problem.storage))


def _tiles(problem: AttentionProblem, block_q: int, block_kv: int, rows: int) -> Iterator[Fa1Tile]:
    build = _forward_tiles if problem.operation == "forward" else _backward_tiles
    widths = bucket(problem.head_dim), bucket(problem.head_dim_v)
    yield from build(block_q, block_kv, rows, problem.storage, *widths)


def _forward_tiles(
    block_q: int, block_kv: int, rows: int, storage: DTypeName, head_dim: int, head_dim_v: int
) -> Iterator[Fa1ForwardTile]:
    """Yield tiles of warps with one fragment's rows; up to eight warps divide the keys too."""
    if block_q % rows or block_kv % key_step(storage):
        return
    warps_q = block_q // rows
    for warps_kv in (8, 4, 2, 1):
        if warps_kv > 1 and warps_q * warps_kv > 8:
            continue
        if block_kv % (warps_kv * key_step(storage)) == 0:
            yield Fa1ForwardTile(
                block_q, block_kv, warps_q, warps_kv, rows, storage, head_dim, head_dim_v
            )


def _backward_tiles(
    block_q: int, block_kv: int, rows: int, storage: DTypeName, head_dim: int, head_dim_v: int
) -> Iterator[Fa1BackwardTile]:
    """Yield tiles of at most eight warps; two stages of Q and dO come before one."""
    columns = key_step(storage)
    for warps in (8, 4, 2, 1):
        score_grid = warp_grid(block_q, (block_kv,), warps, rows, columns)
        kv_grid = warp_grid(block_kv, (head_dim, head_dim_v), warps, rows, columns)
        q_grid = warp_grid(block_q, (head_dim,), warps, rows, columns)
        if score_grid is None or kv_grid is None or q_grid is None:
            continue
        tile = Fa1BackwardTile(
            block_q=block_q,
            block_kv=block_kv,
            warps=warps,
            score_grid=score_grid,
            kv_grid=kv_grid,
            q_grid=q_grid,
            num_stages=2,
            fragment_rows=rows,
            storage=storage,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
        )
        yield tile
        yield replace(tile, num_stages=1)

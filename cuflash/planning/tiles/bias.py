"""The tiles of ``bias_gradient``, and the resources they need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..device import DeviceLimits
from ..problem import DTYPES, AttentionProblem, DTypeName
from .common import (
    Arithmetic,
    Footprint,
    arithmetics,
    bucket,
    key_step,
    register_limit,
    shared_array,
    values_in_registers,
    warp_grid,
)

__all__ = ["WALKERS", "BiasTile", "bias_tiles"]


class _Row(NamedTuple):
    """Queries, keys and warps of a step, and the numbers that hide latencies."""

    block_q: int
    block_kv: int
    warps: int  # of a walker
    walkers: int = 1
    slots: int = 2
    blocks_per_sm: int = 1


#: Rows of the table, best first.
_ROWS = (
    *(_Row(64, 64, 4, 1, 4, 3), _Row(64, 64, 4, 1, 2, 3)),
    *(_Row(64, 64, 4), _Row(64, 32, 4), _Row(32, 32, 2), _Row(16, 32, 1), _Row(16, 16, 1)),
    _Row(8, 8, 1),
)
#: Rows for few blocks of many steps each.
_OF_MANY_STEPS = (
    *(_Row(64, 32, 2, 6, 4), _Row(64, 32, 2, 6), _Row(32, 32, 2, 4), _Row(32, 32, 2, 2)),
)
#: The numbers of walkers in these rows.
WALKERS = frozenset(row.walkers for row in _OF_MANY_STEPS)


@dataclass(frozen=True)
class BiasTile:
    """The pairs of a step, whose sums stay in registers.

    ``by_rows`` and ``by_keys`` say whether different queries and different keys
    have separate sums. If only one is set, one warp computes a sum. Walkers are
    groups of warps that take the steps of a block in turn, each with its own slots
    for Q and K, or dO and V.
    """

    row: _Row
    grid: tuple[int, int]  # of warps
    by_rows: bool
    by_keys: bool
    storage: DTypeName
    compute: DTypeName
    width: int  # the larger bucket of the two head dims
    arithmetic: Arithmetic

    @property
    def footprint(self) -> Footprint:
        """Shared memory exactly as the kernel lays it out, registers as an estimate."""
        row = self.row
        slot = sum(
            shared_array(rows * self.width, self.storage) for rows in (row.block_q, row.block_kv)
        )
        sums = row.block_q * row.block_kv * DTYPES[self.compute].itemsize
        shared = max(row.walkers * row.slots * slot, (row.walkers - 1) * sums)
        rows, columns = row.block_q // self.grid[0], row.block_kv // self.grid[1]
        held = 3 * values_in_registers(rows, columns, self.compute)  # S, dP and the sums
        threads = 32 * row.warps * row.walkers
        return Footprint(shared, held + 56, threads, row.blocks_per_sm)

    def shares_registers(self, limits: DeviceLimits) -> bool:
        """Return whether a multiprocessor has registers for all of its blocks."""
        footprint = self.footprint
        together = footprint.threads * footprint.blocks_per_sm
        return footprint.registers <= register_limit(limits, together)

    def constants(self) -> dict[str, int]:
        """Return the constants that the device code reads from ``Config``."""
        return {
            "block_q": self.row.block_q,
            "block_kv": self.row.block_kv,
            "warps": self.row.warps,
            "walkers": self.row.walkers,
            "slots": self.row.slots,
            "score_grid_rows": self.grid[0],
            "score_grid_columns": self.grid[1],
            "fragment_rows": self.arithmetic.fragment_rows,
            "by_rows": int(self.by_rows),
            "by_keys": int(self.by_keys),
        }


def bias_tiles(
    problem: AttentionProblem,
    limits: DeviceLimits,
    by_rows: bool,
    by_keys: bool,
    few_blocks_of: int = 0,
) -> Iterator[BiasTile]:
    """Yield the tiles that fit the device, best first.

    If ``few_blocks_of`` is given, blocks are few and have that many steps each:
    tiles with several walkers come first.
    """
    width = max(bucket(problem.head_dim), bucket(problem.head_dim_v))
    for arithmetic in arithmetics(problem.storage, limits.compute_capability):
        several = (row for row in _OF_MANY_STEPS if row.walkers <= few_blocks_of)
        for row in (*several, *_ROWS):
            grid = _warps_of(problem, row, arithmetic, by_rows, by_keys)
            if grid is None:
                continue
            types = problem.storage, problem.compute
            tile = BiasTile(row, grid, by_rows, by_keys, *types, width, arithmetic)
            if tile.footprint.excess(limits) is None and tile.shares_registers(limits):
                yield tile


def _warps_of(
    problem: AttentionProblem, row: _Row, arithmetic: Arithmetic, by_rows: bool, by_keys: bool
) -> tuple[int, int] | None:
    """Return the grid of a row's warps; None if the tile cannot be divided among them."""
    units = arithmetic.fragment_rows, key_step(problem.storage)
    grid = (1, row.warps) if by_keys else (row.warps, 1)
    if by_rows and by_keys:
        grid = warp_grid(row.block_q, (row.block_kv,), row.warps, *units) or grid
    whole = row.block_q % (grid[0] * units[0]) == 0 and row.block_kv % (grid[1] * units[1]) == 0
    return grid if whole and grid[0] * grid[1] == row.warps else None

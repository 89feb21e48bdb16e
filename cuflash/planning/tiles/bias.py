"""``bias_gradient``: tiles and what they need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..device import DeviceLimits
from ..problem import AttentionProblem, DTypeName
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

__all__ = ["BiasTile", "bias_tiles"]

#: Queries, keys and warps, best first.
_BLOCKS = (
    *((64, 128, 8), (128, 64, 8), (64, 64, 4), (64, 32, 4)),
    *((32, 32, 2), (16, 32, 1), (16, 16, 1), (8, 8, 1)),
)


@dataclass(frozen=True)
class BiasTile:
    """The pairs of a step, whose sums stay in registers.

    ``by_rows`` and ``by_keys`` say whether the sums of different queries and
    of different keys are kept apart. Where only one is, a sum is of one warp.
    """

    block_q: int
    block_kv: int
    warps: int
    grid: tuple[int, int]  # of warps
    by_rows: bool
    by_keys: bool
    storage: DTypeName
    compute: DTypeName
    width: int  # the larger of the two
    arithmetic: Arithmetic

    @property
    def footprint(self) -> Footprint:
        """Shared memory exactly as the kernel lays it out, registers as an estimate."""
        shared = sum(
            shared_array(rows * self.width, self.storage) for rows in (self.block_q, self.block_kv)
        )
        rows, columns = self.block_q // self.grid[0], self.block_kv // self.grid[1]
        held = 3 * values_in_registers(rows, columns, self.compute)  # S, dP and the sums
        return Footprint(shared, held + 56, 32 * self.warps)

    def constants(self) -> dict[str, int]:
        """What the device code reads from ``Config``."""
        return {
            "block_q": self.block_q,
            "block_kv": self.block_kv,
            "warps": self.warps,
            "score_grid_rows": self.grid[0],
            "score_grid_columns": self.grid[1],
            "fragment_rows": self.arithmetic.fragment_rows,
            "by_rows": int(self.by_rows),
            "by_keys": int(self.by_keys),
        }


def bias_tiles(
    problem: AttentionProblem, limits: DeviceLimits, by_rows: bool, by_keys: bool
) -> Iterator[BiasTile]:
    """Those that fit the device, best first."""
    width = max(bucket(problem.head_dim), bucket(problem.head_dim_v))
    for arithmetic in arithmetics(problem.storage, limits.compute_capability):
        for block_q, block_kv, warps in _BLOCKS:
            units = arithmetic.fragment_rows, key_step(problem.storage)
            grid = (1, warps) if by_keys else (warps, 1)
            if by_rows and by_keys:
                grid = warp_grid(block_q, (block_kv,), warps, *units) or grid
            whole = block_q % (grid[0] * units[0]) == 0 and block_kv % (grid[1] * units[1]) == 0
            if not whole or grid[0] * grid[1] != warps:
                continue
            tile = BiasTile(
                *(block_q, block_kv, warps, grid, by_rows, by_keys),
                *(problem.storage, problem.compute, width, arithmetic),
            )
            if tile.footprint.excess(limits) is None:
                yield tile

"""Shared by the tiles of all generations: head-dim buckets, sizes, limits of a device."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

from ..device import DeviceLimits
from ..problem import DTYPES, ELEMENTS, DTypeName, ElementName

__all__ = [
    "HEAD_DIM_BUCKETS",
    "Arithmetic",
    "Footprint",
    "ProductKind",
    "arithmetics",
    "bucket",
    "byte_panels",
    "ceil_div",
    "fragment_row_choices",
    "key_step",
    "register_limit",
    "round_down",
    "shared_array",
    "values_in_registers",
    "warp_grid",
]

#: How tiles are multiplied: on the tensor cores for 16-bit storage, for float32 by three tf32
#: products each, and for float64 (both from sm_80 on); or by fused multiply-adds ("scalar").
ProductKind = Literal["tensor_cores", "tf32", "fp64", "scalar"]

#: Widths that kernels are compiled for; a head takes the narrowest that holds
#: it, and the columns beyond it are zeros. 16 is the depth of one matrix
#: instruction; 32 saves heads of 24 and 32 from the cost of 64; from 64 on the
#: steps are half of the power of two below, so that a head_dim above 64 gets at
#: most half as many columns again. Every bucket costs a compilation.
HEAD_DIM_BUCKETS = (16, 32, 64, 96, 128, 192, 256)


def bucket(head_dim: int, buckets: tuple[int, ...] = HEAD_DIM_BUCKETS) -> int:
    """Return the narrowest bucket that holds ``head_dim`` columns."""
    return next(b for b in buckets if b >= head_dim)


def byte_panels(rows: int, *widths: int) -> int:
    """Return the bytes of float8 rows of the largest width: 64 bytes each, or a multiple of 128."""
    return rows * (64 if max(widths) <= 64 else ceil_div(max(widths), 128) * 128)


def ceil_div(a: int, b: int) -> int:
    """Return ``a / b`` rounded up."""
    return -(-a // b)


def round_down(a: int, multiple: int) -> int:
    """Return the largest multiple not above ``a``."""
    return a // multiple * multiple


def shared_array(count: int, dtype: ElementName) -> int:
    """Return the bytes of a ``SharedArray`` of the device code: one or more lines of 128 bytes."""
    return max(1, ceil_div(count * ELEMENTS[dtype].itemsize, 128)) * 128


def fragment_row_choices(storage: DTypeName) -> tuple[int, ...]:
    """Return the possible rows of a register fragment, preferred first.

    The 16-bit matrix instructions have 16 rows, and scalar products share most
    loads with 16. 8 rows are for little shared memory, and for float64, whose
    values take two registers.
    """
    return {"float32": (16, 8), "float64": (8,)}.get(storage, (16,))


def key_step(storage: DTypeName) -> int:
    """Return the unit in which keys and head dims are divided among warps.

    ldmatrix loads 16 columns of a 16-bit operand at a time; scalar products
    need only whole fragments.
    """
    return 8 if storage in ("float32", "float64") else 16


def values_in_registers(rows: int, columns: int, compute: DTypeName) -> int:
    """Return the registers of a thread for its elements of a warp's ``rows x columns`` tile."""
    return ceil_div(rows * columns, 32) * (DTYPES[compute].itemsize // 4)


def register_limit(limits: DeviceLimits, threads: int) -> int:
    """Return the most registers of a thread if a multiprocessor runs only ``threads`` of them."""
    return min(255, round_down(limits.registers_per_block // threads, 8))


@dataclass(frozen=True)
class Arithmetic:
    """How tiles are multiplied, and the fragments that follow from it."""

    products: ProductKind
    mma_depth: int  # of the matrix instruction; 0: scalar products
    fragment_rows: int


def arithmetics(storage: DTypeName, capability: tuple[int, int]) -> tuple[Arithmetic, ...]:
    """Return the tensor cores' instructions for a storage type, best first, or multiply-adds.

    For float64 an H200 runs m16n8k8 at least as fast as m16n8k16, and m8n8k4 at two
    thirds of that speed; m8n8k4 has smaller fragments, for tiles short of registers.
    """
    if DTYPES[storage].itemsize == 2:
        return (Arithmetic("tensor_cores", 16 if capability >= (8, 0) else 8, 16),)
    if capability < (8, 0):
        return (Arithmetic("scalar", 0, 8),)
    if storage == "float32":
        return (Arithmetic("tf32", 8, 16),)
    small = Arithmetic("fp64", 4, 8)
    return (Arithmetic("fp64", 8, 16), small) if capability >= (9, 0) else (small,)


@functools.lru_cache(maxsize=4096)  # plans ask for the same few again and again
def warp_grid(
    rows: int, columns: tuple[int, ...], warps: int, row_unit: int, column_unit: int
) -> tuple[int, int] | None:
    """Return the grid of warps with the least cost: area for products, sides for operand reads."""
    grids = [
        (r, c)
        for r in range(1, warps + 1)
        for c in range(1, warps // r + 1)
        if rows % (r * row_unit) == 0 and all(w % (c * column_unit) == 0 for w in columns)
    ]

    def cost(grid: tuple[int, int]) -> int:
        height, width = rows // grid[0], max(columns) // grid[1]
        return height * width + 8 * (height + width)

    return min(grids, key=cost) if grids else None


@dataclass(frozen=True)
class Footprint:
    """The resources of one multiprocessor that a tile needs."""

    shared_bytes: int
    registers: int  # of one thread, estimated
    threads: int
    blocks_per_sm: int = 1  # that share a multiprocessor

    def pressure(self, limits: DeviceLimits) -> float:
        """Return the fraction of the scarcest resource that it takes; above 1 it does not fit."""
        if self.threads > 1024:
            return math.inf
        return max(
            self.shared_bytes / limits.shared_per_block,
            self._shared_per_sm / limits.shared_per_sm,
            self.registers / register_limit(limits, self.threads),
        )

    @property
    def _shared_per_sm(self) -> int:
        """Bytes of all blocks, with 1 KiB for the system each (CUDA C Programming Guide)."""
        return self.blocks_per_sm * (self.shared_bytes + 1024) if self.blocks_per_sm > 1 else 0

    def excess(self, limits: DeviceLimits) -> str | None:
        """Return the resource that does not fit, with figures; None if everything fits."""
        if self.shared_bytes > limits.shared_per_block:
            return (
                f"{self.shared_bytes:,} bytes of shared memory, "
                f"the device has {limits.shared_per_block:,}"
            )
        if self._shared_per_sm > limits.shared_per_sm:
            return (
                f"{self._shared_per_sm:,} bytes of shared memory for {self.blocks_per_sm} blocks, "
                f"a multiprocessor has {limits.shared_per_sm:,}"
            )
        if self.threads > 1024:
            return f"{self.threads} threads, a block has at most 1024"
        available = register_limit(limits, self.threads)
        if self.registers > available:
            return (
                f"about {self.registers} registers for each of {self.threads} threads, "
                f"the device has {available}"
            )
        return None

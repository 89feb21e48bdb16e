"""What the tiles of all generations share: head-dim buckets, sizes, what a device can hold."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

from ..device import DeviceLimits
from ..problem import DTYPES, DTypeName

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

#: What multiplies tiles: the tensor cores where storage has 16 bits, for float32 by three tf32
#: products for each and for float64 (both from sm_80 on); or fused multiply-adds.
ProductKind = Literal["tensor_cores", "tf32", "fp64", "scalar"]

#: Widths that kernels are compiled for; a head takes the narrowest that holds
#: it, the columns beyond it are zeros. 16 is the depth of one matrix
#: instruction; 32 keeps the heads of 24 and 32 from paying twice; from 64 on
#: the steps are half of the power of two below, so that no head_dim above 32
#: pays for more than half again of its columns. A bucket costs a compile.
HEAD_DIM_BUCKETS = (16, 32, 64, 96, 128, 192, 256)


def bucket(head_dim: int, buckets: tuple[int, ...] = HEAD_DIM_BUCKETS) -> int:
    """The narrowest bucket that holds ``head_dim`` columns."""
    return next(b for b in buckets if b >= head_dim)


def byte_panels(rows: int, *widths: int) -> int:
    """Bytes of float8 numbers of the widest: rows of 64 bytes, or of a multiple of 128."""
    return rows * (64 if max(widths) <= 64 else ceil_div(max(widths), 128) * 128)


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


def round_down(a: int, multiple: int) -> int:
    """The largest multiple not above ``a``."""
    return a // multiple * multiple


def shared_array(count: int, dtype: DTypeName) -> int:
    """Bytes of a ``SharedArray`` of the device code: whole 128-byte lines, at least one."""
    return max(1, ceil_div(count * DTYPES[dtype].itemsize, 128)) * 128


def fragment_row_choices(storage: DTypeName) -> tuple[int, ...]:
    """Rows of a register fragment, preferred first.

    16 is what the 16-bit matrix instructions have, and what shares most loads
    among scalar products; 8 is for where shared memory is short, and for
    float64, whose values take two registers.
    """
    return {"float32": (16, 8), "float64": (8,)}.get(storage, (16,))


def key_step(storage: DTypeName) -> int:
    """Keys and head dims are parted among warps in multiples of this.

    ldmatrix brings 16 columns of a 16-bit operand at a time; scalar products
    need only whole fragments.
    """
    return 8 if storage in ("float32", "float64") else 16


def values_in_registers(rows: int, columns: int, compute: DTypeName) -> int:
    """Registers a thread needs for its part of a warp's ``rows x columns`` tile."""
    return ceil_div(rows * columns, 32) * (DTYPES[compute].itemsize // 4)


def register_limit(limits: DeviceLimits, threads: int) -> int:
    """Registers a thread may have when ``threads`` of them share a multiprocessor alone."""
    return min(255, round_down(limits.registers_per_block // threads, 8))


@dataclass(frozen=True)
class Arithmetic:
    """How tiles are multiplied, and the fragments that follow from it."""

    products: ProductKind
    mma_depth: int  # of the matrix instruction; 0: scalar products
    fragment_rows: int


def arithmetics(storage: DTypeName, capability: tuple[int, int]) -> tuple[Arithmetic, ...]:
    """The tensor cores' instructions for a storage type, best first, or fused multiply-adds.

    For float64 an H200 runs m16n8k8 as fast as m16n8k16 or faster, m8n8k4 at two
    thirds of it; the last has smaller fragments, for where registers are short.
    """
    if DTYPES[storage].itemsize == 2:
        return (Arithmetic("tensor_cores", 16 if capability >= (8, 0) else 8, 16),)
    if capability < (8, 0):
        return (Arithmetic("scalar", 0, 8),)
    if storage == "float32":
        return (Arithmetic("tf32", 8, 16),)
    small = Arithmetic("fp64", 4, 8)
    return (Arithmetic("fp64", 8, 16), small) if capability >= (9, 0) else (small,)


@functools.lru_cache(maxsize=4096)  # plans ask for the same few, over and over
def warp_grid(
    rows: int, columns: tuple[int, ...], warps: int, row_unit: int, column_unit: int
) -> tuple[int, int] | None:
    """The grid whose parts cost least: products by their area, operands read by their sides."""
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
    """What a tile asks of one multiprocessor."""

    shared_bytes: int
    registers: int  # of one thread, estimated
    threads: int
    blocks_per_sm: int = 1  # that share a multiprocessor

    def pressure(self, limits: DeviceLimits) -> float:
        """How much of the scarcest resource it takes; above 1 it does not fit."""
        if self.threads > 1024:
            return math.inf
        return max(
            self.shared_bytes / limits.shared_per_block,
            self._shared_per_sm / limits.shared_per_sm,
            self.registers / register_limit(limits, self.threads),
        )

    @property
    def _shared_per_sm(self) -> int:
        """Of all its blocks; the system keeps a KiB for each (CUDA C Programming Guide)."""
        return self.blocks_per_sm * (self.shared_bytes + 1024) if self.blocks_per_sm > 1 else 0

    def excess(self, limits: DeviceLimits) -> str | None:
        """What does not fit, with the figures; None if everything does."""
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

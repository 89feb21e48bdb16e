"""The small kernels that generations share."""

from __future__ import annotations

from dataclasses import dataclass

from ..device import DeviceLimits
from ..problem import DTypeName
from .common import Footprint, ceil_div, shared_array

__all__ = [
    "BLOCKS_OF_WORD",
    "ROWS",
    "ArgumentTile",
    "DeltaTile",
    "ListTile",
    "MergeTile",
    "RowsTile",
    "SummaryTile",
    "delta_tile",
]

#: Rows of a thread block of the kernels before and after a backward pass: a multiple of every
#: q tile, so that a tile never reaches beyond a head's rows of the workspace.
ROWS = 128

#: The largest number of queries of a head for which the warps of a block share a row's chunks.
_FEW_ROWS = 64

#: Blocks of ``summarise_mask`` for each word of 32 tiles.
BLOCKS_OF_WORD = 4


@dataclass(frozen=True)
class DeltaTile:
    """``delta``: ``warps`` warps in a block; each warp takes one row after the other."""

    warps: int
    grid: int

    @property
    def footprint(self) -> Footprint:
        """Registers only."""
        return Footprint(0, 40, 32 * self.warps)

    def constants(self) -> dict[str, int]:
        """Return the constants that the device code reads from ``Config``."""
        return {"warps": self.warps}


def delta_tile(rows: int, limits: DeviceLimits) -> DeltaTile:
    """Return the tile for blocks of eight warps, at most eight per multiprocessor."""
    warps = 8
    return DeltaTile(warps, min(ceil_div(rows, warps), 8 * limits.num_sms))


@dataclass(frozen=True)
class RowsTile:
    """``statistics`` and ``convert_dq``: :data:`ROWS` rows of a head for each block."""

    fragment_rows: int
    warps: int = 8

    @property
    def footprint(self) -> Footprint:
        """Registers only."""
        return Footprint(0, 64, 32 * self.warps)

    def converting(self, head_dim: int, storage: DTypeName) -> Footprint:
        """Return the footprint of ``convert_dq``: each warp stages columns of a fragment's rows."""
        columns = next(c for c in (64, 32, 16) if head_dim % c == 0)
        part = shared_array(self.fragment_rows * columns, storage)
        return Footprint(self.warps * part, 96, 32 * self.warps)

    def constants(self) -> dict[str, int]:
        """Return the constants that the device code reads from ``Config``."""
        return {"warps": self.warps, "rows": ROWS, "fragment_rows": self.fragment_rows}


@dataclass(frozen=True)
class ArgumentTile:
    """``sink_gradient`` and ``slope_gradient``: a query head for each block."""

    warps: int = 32

    @property
    def footprint(self) -> Footprint:
        """A double for each thread."""
        return Footprint(shared_array(32 * self.warps, "float64"), 64, 32 * self.warps)

    def constants(self) -> dict[str, int]:
        """Return the constants that the device code reads from ``Config``."""
        return {"warps": self.warps}


#: Most warps of a block of ``merge``.
MERGE_WARPS = 8


@dataclass(frozen=True)
class MergeTile:
    """``merge``: a row for each warp; for each block if few rows have many chunks.

    With ``in_order`` several warps divide the columns of a row.
    """

    block_q: int  # of the main kernel
    block_kv: int
    chunks: int
    seqlen_q: int
    head_dim_v: int  # a bucket
    compute: DTypeName
    in_order: bool = False  # chunks are added one after the other

    @property
    def warps(self) -> int:
        """Warps of a block: the largest multiple of :attr:`warps_of_row` up to eight."""
        return MERGE_WARPS // self.warps_of_row * self.warps_of_row

    @property
    def warps_of_row(self) -> int:
        """Warps that divide the columns of a row."""
        return ceil_div(self.head_dim_v, 32) if self.in_order else 1

    @property
    def shared_rows(self) -> bool:
        """Whether all warps of a block share one row, and divide its chunks."""
        return not self.in_order and self.chunks > self.warps and self.seqlen_q <= _FEW_ROWS

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return 1 if self.shared_rows else self.warps // self.warps_of_row

    @property
    def footprint(self) -> Footprint:
        """Shared memory holds each warp's sum and output, if warps share a row."""
        numbers = self.warps * (ceil_div(self.head_dim_v, 32) * 32 + 1) * self.shared_rows
        shared = shared_array(numbers, self.compute)
        narrow = self.head_dim_v <= 128 and self.compute == "float32" and not self.shared_rows
        blocks = 4 if self.in_order else 6 if narrow else 2
        return Footprint(shared, 40, 32 * self.warps, blocks)

    def constants(self) -> dict[str, int]:
        """Return the constants that the device code reads from ``Config``."""
        return {
            "block_q": self.block_q,
            "block_kv": self.block_kv,
            "warps": self.warps,
            "chunks_at_once": 16 if self.in_order else 8 if self.shared_rows else 2,
            "shared_rows": int(self.shared_rows),
            "in_order": int(self.in_order),
            "warps_of_row": self.warps_of_row,
        }


@dataclass(frozen=True)
class ItemsTile:
    """``list_items``: one block, a warp for each sequence."""

    rows: int  # of a tile
    rows_of_keys: bool
    last_first: bool  # the last tile of a sequence comes first
    of_caches: bool = False  # keys are in caches, and an array has their number for each entry
    warps: int = 32

    @property
    def footprint(self) -> Footprint:
        """One number for each of 64 classes of lengths, for each warp, and for the block."""
        return Footprint(shared_array(64 + self.warps + 1, "float32"), 64, 32 * self.warps)

    def constants(self) -> dict[str, int]:
        """Return the constants that the device code reads from ``Config``."""
        return {
            "block": self.rows,
            "rows_of_keys": int(self.rows_of_keys),
            "last_first": int(self.last_first),
            "of_caches": int(self.of_caches),
            "warps": self.warps,
        }


@dataclass(frozen=True)
class ListTile:
    """``list_blocks``: eight neighbouring tiles for each thread, four threads a word."""

    block_q: int
    block_kv: int
    block: tuple[int, int]  # queries and keys of a block of the mask
    rows_of_keys: bool  # a row of tiles belongs to a kv tile
    warps: int = 8

    @property
    def words(self) -> int:
        """Words of a thread block."""
        return 32 * self.warps // 4

    @property
    def footprint(self) -> Footprint:
        """Registers only."""
        return Footprint(0, 64, 32 * self.warps)

    def constants(self) -> dict[str, int]:
        """Return the constants that the device code reads from ``Config``."""
        return {
            "block_q": self.block_q,
            "block_kv": self.block_kv,
            "block_queries": self.block[0],
            "block_keys": self.block[1],
            "rows_of_keys": int(self.rows_of_keys),
            "warps": self.warps,
        }


@dataclass(frozen=True)
class SummaryTile:
    """``summarise_mask``: eight neighbouring tiles for each block."""

    block_q: int
    block_kv: int
    rows_of_keys: bool  # a row of tiles belongs to a kv tile
    one_row: bool  # the mask is the same for all queries
    listed: bool  # the pass needs bits of tiles
    warps: int = 8

    @property
    def footprint(self) -> Footprint:
        """Shared memory holds bits of two tiles, sixteen keys in a number."""
        numbers = 2 * self.block_q * (self.block_kv // 16)
        return Footprint(shared_array(numbers, "float16"), 64, 32 * self.warps)

    def constants(self) -> dict[str, int]:
        """Return the constants that the device code reads from ``Config``."""
        return {
            "block_q": self.block_q,
            "block_kv": self.block_kv,
            "rows_of_keys": int(self.rows_of_keys),
            "one_row": int(self.one_row),
            "listed": int(self.listed),
            "warps": self.warps,
        }

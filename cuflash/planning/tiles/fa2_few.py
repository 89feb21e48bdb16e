"""FlashAttention-2's forward pass for few queries: the tile and the resources it needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..device import DeviceLimits
from ..problem import DTYPES, AttentionProblem, ElementName
from ..step_time import StepTime
from .common import Arithmetic, Footprint, arithmetics, bucket, shared_array, values_in_registers
from .fa2_tables import FEW_BUCKETS, FORWARD_OF_FEW, ForwardFewRow

__all__ = ["ROWS", "Fa2FewTile", "few_tile", "why_not_few"]

#: Rows of queries of a tile: one fragment of the matrix instructions.
ROWS = 16

#: Features that the kernel has. The others hide tiles, drop weights, or read an array of pairs.
_FEATURES = frozenset(
    (
        *("window", "used_lengths", "softcap", "alibi", "sinks"),
        *("cached_keys", "packed_queries", "packed_group", "kv_chunks", "float8"),
    )
)
#: Compute capability of the conversion of float8 numbers.
_FLOAT8_DEVICE = (8, 9)


@dataclass(frozen=True)
class Fa2FewTile:
    """All warps have the same 16 rows and divide the keys; each has a ring of its own."""

    block_q: int
    block_kv: int  # keys of a step of a warp
    warps: int
    blocks_per_sm: int
    num_slots: int  # of K and V by turns, for each warp
    stored: ElementName
    head_dim: int
    head_dim_v: int
    arithmetic: Arithmetic
    step: StepTime = field(compare=False)

    #: The file of the kernel.
    kernel = "forward_few"

    @property
    def footprint(self) -> Footprint:
        """Shared memory exactly as the kernel lays it out, registers as an estimate."""
        slot = shared_array(self.block_kv * max(self.head_dim, self.head_dim_v), self.stored)
        shared = (
            shared_array(self.block_q * self.head_dim, "float16")
            + shared_array(2 * self.warps * self.block_q, "float32")
            + self.warps * self.num_slots * slot
        )
        held = values_in_registers(self.block_q, self.head_dim_v + self.block_kv, "float32")
        return Footprint(shared, held + 56, 32 * self.warps, self.blocks_per_sm)

    def constants(self) -> dict[str, int]:
        """Return the constants that the device code reads from ``Config``."""
        return {
            "block_q": self.block_q,
            "block_kv": self.block_kv,
            "warps": self.warps,
            "num_slots": self.num_slots,
            "fragment_rows": self.arithmetic.fragment_rows,
        }


def few_tile(problem: AttentionProblem, limits: DeviceLimits) -> Fa2FewTile | None:
    """Return the first tile of the table that fits; None if a pass cannot have one."""
    if why_not_few(problem, limits) is not None:
        return None
    tiles = (tile_of_row(problem, limits, row) for row in _rows(problem))
    return next((tile for tile in tiles if tile.footprint.excess(limits) is None), None)


def tile_of_row(problem: AttentionProblem, limits: DeviceLimits, row: ForwardFewRow) -> Fa2FewTile:
    """Return the tile of a row for the head dims of a problem."""
    return Fa2FewTile(
        ROWS,
        row.block_kv,
        row.warps,
        row.blocks_per_sm,
        row.num_slots,
        problem.stored,
        bucket(problem.head_dim, FEW_BUCKETS),
        bucket(problem.head_dim_v, FEW_BUCKETS),
        arithmetics(problem.storage, limits.compute_capability)[0],
        StepTime(row.step, row.step_beside),
    )


def why_not_few(problem: AttentionProblem, limits: DeviceLimits) -> str | None:
    """Return why a pass cannot have the tile; None if it can."""
    if problem.operation != "forward":
        return "is for the forward pass"
    if DTYPES[problem.storage].itemsize != 2:
        return f"takes float16 and bfloat16, not {problem.storage}"
    if problem.alignment == "element":
        return "takes rows that begin at multiples of 16 bytes"
    if limits.compute_capability < (_FLOAT8_DEVICE if problem.float8 else (8, 0)):
        return "needs a newer device"
    if (problem.most_queries or problem.seqlen_q) > ROWS:
        return f"takes up to {ROWS} queries, or query heads of one query"
    for name in problem.features:
        if name not in _FEATURES:
            return f"takes no {name}"
    return None


def _rows(problem: AttentionProblem) -> Iterator[ForwardFewRow]:
    itemsize = 1 if problem.float8 else 2
    width = max(problem.head_dim, problem.head_dim_v)
    yield from (row for row in FORWARD_OF_FEW[itemsize] if width <= row.widest)

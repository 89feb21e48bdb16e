"""FlashAttention-2: candidate tiles, best first, and what they need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..problem import DTYPES, AttentionProblem, DTypeName
from .common import Footprint, bucket, fragment_row_choices, shared_array, values_in_registers

__all__ = ["Fa2ForwardTile"]


@dataclass(frozen=True)
class Fa2ForwardTile:
    """The forward pass: ``warps`` warps part the rows, K and V stream through two stages."""

    block_q: int
    block_kv: int
    warps: int
    blocks_per_sm: int
    fragment_rows: int
    storage: DTypeName
    head_dim: int
    head_dim_v: int
    q_in_registers: int = 0

    @property
    def footprint(self) -> Footprint:
        """Shared memory exactly as the kernel lays it out, registers as an estimate."""
        compute = DTYPES[self.storage].compute
        scalar = False
        shared = (
            shared_array(self.block_q * self.head_dim, self.storage)
            + 2 * shared_array(self.block_kv * self.head_dim, self.storage)
            + 2 * shared_array(self.block_kv * self.head_dim_v, self.storage)
            + shared_array(self.block_q * self.block_kv if scalar else 0, self.storage)
        )
        rows = self.block_q // self.warps
        held = values_in_registers(rows, self.head_dim_v, compute)
        held += values_in_registers(rows, self.block_kv, compute)
        return Footprint(shared, held + 60, 32 * self.warps, self.blocks_per_sm)

    def constants(self) -> dict[str, int]:
        """What the device code reads from ``Config``."""
        return {
            "block_q": self.block_q,
            "block_kv": self.block_kv,
            "warps": self.warps,
            "fragment_rows": self.fragment_rows,
            "q_in_registers": self.q_in_registers,
        }

"""FlashAttention-3's backward pass for few queries: the tile and what it needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..problem import AttentionProblem
from . import fa3_registers
from .common import Footprint, ceil_div
from .fa3_tables import BACKWARD_OF_FEW
from .operand_tiles import NO_OPERAND
from .panels import PANEL, panels

__all__ = ["Fa3FewTile", "few_tiles", "why_not_few"]


@dataclass(frozen=True)
class Fa3FewTile:
    """All queries of a head in one tile, whose dQ two warpgroups keep in registers.

    K and V come through rings; dK and dV of a kv tile are finished in one step.
    With ``many`` it is the fastest only where there are more kv tiles, over all heads,
    than multiprocessors.
    """

    block_q: int
    block_kv: int
    k_stages: int
    v_stages: int
    head_dim: int
    head_dim_v: int
    many: bool = field(default=False, compare=False)

    #: Those that do arithmetic.
    warpgroups = 2
    #: Terms of the scores that read an array have no place in it.
    operand = NO_OPERAND

    @property
    def footprint(self) -> Footprint:
        """Shared memory exactly as the kernel lays it out; the registers of the math role."""
        widths = self.head_dim, self.head_dim_v
        shared = sum(panels(self.block_q, columns) for columns in widths)
        for stages, columns in zip((self.k_stages, self.v_stages), widths, strict=True):
            shared += stages * panels(self.block_kv, columns)
        shared += panels(self.block_q, self.block_kv)  # dS
        shared += 4 * self.warpgroups * panels(16, PANEL)  # of dK and dV, a panel for each warp
        shared += 2 * 4 * self.block_q  # lse and delta
        shared += 8 * (4 + 2 * (self.k_stages + self.v_stages))  # barriers
        threads = 128 * (self.warpgroups + 1)
        return Footprint(ceil_div(shared, 1024) * 1024, 65536 // threads // 8 * 8, threads)

    def constants(self) -> dict[str, int]:
        """What the device code reads from ``Config``."""
        return {
            "block_q": self.block_q,
            "block_kv": self.block_kv,
            "k_stages": self.k_stages,
            "v_stages": self.v_stages,
            "fragment_rows": 16,
            "load_registers": fa3_registers.BACKWARD.load,
            "math_registers": fa3_registers.BACKWARD.math,
            "packed": 0,
            "listed": 0,
        }


def few_tiles(problem: AttentionProblem) -> Iterator[Fa3FewTile]:
    """The narrowest tile that a backward pass fits in, if it has few queries and no features."""
    if why_not_few(problem) is not None:
        return
    for row in BACKWARD_OF_FEW:
        if problem.head_dim <= row.widest and problem.head_dim_v <= row.widest_v:
            blocks = row.block_q, row.block_kv
            stages = row.k_stages, row.v_stages
            yield Fa3FewTile(*blocks, *stages, row.widest, row.widest_v, row.many)
            return


def why_not_few(problem: AttentionProblem) -> str | None:
    """What of a backward pass the tile has no kernel for; None if it has one."""
    rows = min(row.block_q for row in BACKWARD_OF_FEW)
    if problem.seqlen_q > rows:
        return f"takes up to {rows} queries, not {problem.seqlen_q}"
    if problem.group > 1:
        return f"takes a head of keys for each query head, not for {problem.group}"
    if problem.uses:
        return f"takes no {problem.uses[0].feature}"
    return None

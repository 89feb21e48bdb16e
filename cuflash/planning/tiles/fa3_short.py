"""FlashAttention-3's backward pass for short heads: the tile and what it needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..problem import AttentionProblem
from . import fa3_registers
from .common import Footprint, ceil_div
from .fa3_tables import BACKWARD_OF_SHORT
from .operand_tiles import NO_OPERAND
from .panels import PANEL, panels

__all__ = ["Fa3ShortTile", "short_tiles", "why_not_short"]

#: Queries of a q tile, and q tiles whose dS shares one stage: one for each warpgroup.
_ROWS, _TILES_OF_PAIR = 64, 2


@dataclass(frozen=True)
class Fa3ShortTile:
    """All queries of a head in q tiles of 64, whose dQ two warpgroups keep in registers.

    K and V come through rings. A kv tile goes through all q tiles, then its dK and dV
    are finished.
    """

    q_tiles: int
    block_kv: int
    kv_stages: int
    head_dim: int
    head_dim_v: int

    #: The warpgroups that do arithmetic; one more loads.
    warpgroups = 2
    #: Stages of dS, each for a pair of q tiles.
    score_stages = 2
    #: The kernel takes no features, so no array of a feature needs shared memory.
    operand = NO_OPERAND

    @property
    def block_q(self) -> int:
        """Queries of a block."""
        return self.q_tiles * _ROWS

    @property
    def footprint(self) -> Footprint:
        """Shared memory exactly as the kernel lays it out; the registers of the math role."""
        shared = 0
        for columns in (self.head_dim, self.head_dim_v):
            shared += self.q_tiles * panels(_ROWS, columns)
            shared += self.kv_stages * panels(self.block_kv, columns)
        shared += self.score_stages * panels(_TILES_OF_PAIR * _ROWS, self.block_kv)  # dS
        shared += 4 * self.warpgroups * panels(16, PANEL)  # one panel of results per warp
        shared += 2 * 4 * self.block_q  # lse and delta
        shared += 8 * (3 * self.q_tiles + 3 * self.kv_stages + 2 * self.score_stages)  # barriers
        threads = 128 * (self.warpgroups + 1)
        return Footprint(ceil_div(shared, 1024) * 1024, 65536 // threads // 8 * 8, threads)

    def constants(self) -> dict[str, int]:
        """What the device code reads from ``Config``."""
        return {
            "block_q": _ROWS,
            "q_tiles": self.q_tiles,
            "block_kv": self.block_kv,
            "kv_stages": self.kv_stages,
            "score_stages": self.score_stages,
            "fragment_rows": 16,
            "load_registers": fa3_registers.BACKWARD.load,
            "math_registers": fa3_registers.BACKWARD.math,
            "packed": 0,
            "listed": 0,
        }


def short_tiles(problem: AttentionProblem) -> Iterator[Fa3ShortTile]:
    """The narrowest tile that a backward pass fits in, if it fits in one."""
    if why_not_short(problem) is not None:
        return
    for row in BACKWARD_OF_SHORT:
        if problem.head_dim <= row.widest and problem.head_dim_v <= row.widest_v:
            stages = row.q_tiles, row.block_kv, row.kv_stages
            yield Fa3ShortTile(*stages, row.widest, row.widest_v)
            return


def why_not_short(problem: AttentionProblem) -> str | None:
    """Why a backward pass cannot have the tile; None if it can."""
    rows = min(row.q_tiles for row in BACKWARD_OF_SHORT) * _ROWS
    if problem.seqlen_q > rows:
        return f"takes up to {rows} queries, not {problem.seqlen_q}"
    if problem.group > 1:
        return f"takes a head of keys for each query head, not for {problem.group}"
    if problem.uses:
        return f"takes no {problem.uses[0].feature}"
    return None

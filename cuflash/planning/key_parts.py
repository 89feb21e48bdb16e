"""Whether several blocks share the query heads of a kv tile, and the kernel that adds up."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .device import DeviceLimits
from .kernel import KernelLaunch, kernel_config
from .problem import AttentionProblem
from .row_steps import launchable
from .tiles import fa3
from .tiles.common import ceil_div

__all__ = ["KeyParts", "parts_of"]

#: Rounds of tiles over the multiprocessors that are enough where tiles are unequal. Under a mask
#: they come longest first; two rounds could end together if a tile's time were its length alone.
_ROUNDS_CAUSAL = 3
#: Of the multiprocessors' time, where tiles are equal and end in rounds: a part of the last round
#: is lost.
_BUSY_FULL = 0.85


def parts_of(problem: AttentionProblem, tiles: int, at_once: int) -> int:
    """Blocks that share a kv tile: the fewest that keep all multiprocessors busy.

    Each has as many query heads of the group. Of 32 query heads on one of
    keys, two batch entries, 64 tiles, there are 128 blocks of very unequal
    length for 132 multiprocessors: one block does the longest tile in all
    heads while others are long done. Every part costs its own sums in memory,
    so there are no more than needed.

    Parameters
    ----------
    problem
        A backward pass.
    tiles
        Of a head's keys.
    at_once
        Blocks that run at a time.
    """
    blocks, group = problem.batch * problem.heads_kv * tiles, problem.group

    def busy(parts: int) -> float:
        """As a share of what is enough."""
        if problem.mask == "causal":
            return min(1.0, blocks * parts / (_ROUNDS_CAUSAL * at_once))
        rounds = ceil_div(blocks * parts, at_once)
        return min(1.0, blocks * parts / (rounds * at_once) / _BUSY_FULL)

    if blocks == 0:
        return 1
    return max((p for p in range(1, group + 1) if group % p == 0), key=busy)  # the first of equals


@dataclass(frozen=True)
class KeyParts:
    """The parts of dK and dV in the workspace, and ``sum_parts``.

    Attributes
    ----------
    problem, limits
        What is computed, and where.
    tile
        Of the main kernel.
    parts
        Blocks that share a kv tile; 1: they write the gradients themselves.
    """

    problem: AttentionProblem
    limits: DeviceLimits
    tile: fa3.Fa3BackwardTile
    parts: int

    @property
    def seen(self) -> AttentionProblem:
        """The problem as the main kernel has it: every part is a head of keys."""
        return replace(self.problem, heads_kv=self.problem.heads_kv * self.parts)

    @property
    def said(self) -> str:
        """Behind the plan's reason."""
        if self.parts == 1:
            return ""
        return f"; {self.parts} blocks share the query heads of a kv tile, which are few"

    @property
    def constants(self) -> dict[str, int]:
        """Of the main kernel."""
        return {"parted": int(self.parts > 1)}

    @property
    def arguments(self) -> list[tuple[str, int]]:
        """Of the main kernel."""
        if self.parts == 1:
            return []
        return [("heads_kv", self.seen.heads_kv), *self._both]

    @property
    def _both(self) -> tuple[tuple[str, int], ...]:
        return (("parts", self.parts), ("padded_keys", self.padded_keys))

    @property
    def padded_keys(self) -> int:
        """Rows of a head in the workspace."""
        return ceil_div(self.problem.seqlen_kv, self.tile.block_kv) * self.tile.block_kv

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """Buffers of the workspace and their bytes."""
        if self.parts == 1:
            return []
        rows = self.problem.batch * self.seen.heads_kv * self.padded_keys
        widths = {"dk_parts": self.tile.head_dim, "dv_parts": self.tile.head_dim_v}
        return [(name, 4 * rows * width) for name, width in widths.items()]

    @property
    def after(self) -> tuple[KernelLaunch, ...]:
        """``sum_parts``, if there are parts."""
        if self.parts == 1:
            return ()
        problem, tile = self.problem, fa3.SumTile()
        config = kernel_config(
            problem,
            self.limits,
            ("fa3", "sum_parts"),
            fa3.ARITHMETIC,
            tile.constants(),
            tile.footprint,
        )
        widths = self.tile.head_dim, self.tile.head_dim_v
        config = replace(config, mask="full", head_dim=widths[0], head_dim_v=widths[1])
        config = replace(config, output=config.storage)  # what it is changes nothing
        strips = problem.batch * problem.heads_kv * ceil_div(problem.seqlen_kv, fa3.SUM_ROWS)
        places = strips * (sum(widths) // fa3.SUM_COLUMNS)
        grid = launchable(ceil_div(places, tile.warps), "fa3")
        return (KernelLaunch(config, grid, self._both),)

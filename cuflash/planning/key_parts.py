"""How blocks share a kv tile, and the kernel that adds their partial gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from .device import DeviceLimits
from .kernel import KernelLaunch, kernel_config
from .problem import AttentionProblem
from .row_steps import launchable
from .tiles import fa3
from .tiles.common import ceil_div
from .tiles.sum_parts import SUM_COLUMNS, SUM_ROWS, SumTile

__all__ = ["ONE_PART", "KeyParts", "Parts"]


class Parts(NamedTuple):
    """How blocks share a kv tile.

    Attributes
    ----------
    number
        Blocks for each kv tile; 1: a block has the whole tile.
    cut
        Each block has an equal share of the steps over all query heads, wherever it begins and
        ends. Otherwise each has equally many whole query heads.
    last
        Number of kv tiles that are cut, over all heads: those that begin last. Blocks have the
        others whole. 0: every tile is cut.
    """

    number: int
    cut: bool = False
    last: int = 0


#: A block has a whole kv tile.
ONE_PART = Parts(1)


@dataclass(frozen=True)
class KeyParts:
    """Partial dK and dV in the workspace, and the kernel ``sum_parts`` that adds them.

    Attributes
    ----------
    problem, limits
        The problem, and the limits of the device.
    tile
        The tile of the main kernel.
    shared
        How blocks share a kv tile. With one part a block writes the gradients itself.
    """

    problem: AttentionProblem
    limits: DeviceLimits
    tile: fa3.Fa3BackwardTile
    shared: Parts

    @property
    def parts(self) -> int:
        """Number of blocks that share a kv tile."""
        return self.shared.number

    @property
    def heads(self) -> int:
        """Kv heads of the main kernel: where every tile has parts, it takes them for kv heads."""
        return self.problem.heads_kv * (1 if self.shared.last else self.parts)

    @property
    def tiles(self) -> int:
        """Kv tiles of all heads."""
        of_head = ceil_div(self.problem.seqlen_kv, self.tile.block_kv)
        return self.problem.batch * self.problem.heads_kv * of_head

    @property
    def whole_tiles(self) -> int:
        """Kv tiles of all heads that no blocks share, where only the last ones are cut."""
        return self.tiles - self.shared.last

    @property
    def said(self) -> str:
        """The text that follows the plan's reason."""
        if self.parts == 1:
            return ""
        if self.shared.last:
            return (
                f"; {self.parts} blocks share the steps of each of the last {self.shared.last} "
                "kv tiles, which would leave multiprocessors idle"
            )
        what = "steps" if self.shared.cut else "query heads"
        return f"; {self.parts} blocks share the {what} of a kv tile, as kv tiles are few"

    @property
    def constants(self) -> dict[str, int]:
        """Constants of the main kernel."""
        shared = self.shared
        return {
            "parted": int(self.parts > 1),
            "cut": int(shared.cut),
            "cut_last": int(shared.last > 0),
        }

    @property
    def arguments(self) -> list[tuple[str, int]]:
        """Arguments of the main kernel."""
        if self.parts == 1:
            return []
        if self.shared.last:
            return [*self._both]
        return [("heads_kv", self.heads), *self._both]

    @property
    def _both(self) -> tuple[tuple[str, int], ...]:
        both = ("parts", self.parts), ("padded_keys", self.padded_keys)
        return (*both, ("whole_tiles", self.whole_tiles)) if self.shared.last else both

    @property
    def padded_keys(self) -> int:
        """Rows of a head in the workspace, or of a tile where only the last ones are cut."""
        if self.shared.last:
            return self.tile.block_kv
        return ceil_div(self.problem.seqlen_kv, self.tile.block_kv) * self.tile.block_kv

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """Buffers of the workspace and their bytes."""
        if self.parts == 1:
            return []
        cut = self.shared.last or self.problem.batch * self.problem.heads_kv
        rows = cut * self.parts * self.padded_keys
        widths = {"dk_parts": self.tile.head_dim, "dv_parts": self.tile.head_dim_v}
        return [(name, 4 * rows * width) for name, width in widths.items()]

    @property
    def after(self) -> tuple[KernelLaunch, ...]:
        """``sum_parts``, if there are parts."""
        if self.parts == 1:
            return ()
        problem, tile = self.problem, SumTile()
        config = kernel_config(
            problem,
            self.limits,
            ("fa3", "sum_parts"),
            fa3.ARITHMETIC,
            tile.constants() | {"cut_last": int(self.shared.last > 0)},
            tile.footprint,
        )
        widths = self.tile.head_dim, self.tile.head_dim_v
        config = replace(config, mask="full", head_dim=widths[0], head_dim_v=widths[1])
        config = replace(config, features=())  # masks have been applied
        config = replace(config, output=config.storage)  # the kernel does not use it
        strips = problem.batch * problem.heads_kv * ceil_div(problem.seqlen_kv, SUM_ROWS)
        if self.shared.last:
            strips = self.shared.last * self.padded_keys // SUM_ROWS
        places = strips * (sum(widths) // SUM_COLUMNS)
        grid = launchable(ceil_div(places, tile.warps), "fa3")
        return (KernelLaunch(config, grid, self._both),)

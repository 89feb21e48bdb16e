"""Which tiles a boolean mask shows: a bit for each, made before a pass that walks over tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .device import DeviceLimits
from .kernel import KernelLaunch, kernel_config
from .problem import AttentionProblem
from .row_steps import launchable
from .tiles import steps
from .tiles.common import Arithmetic, ceil_div

__all__ = ["MaskLists"]

#: Tiles of a word, and its bytes: a bit that a tile is seen, and one that it is seen whole.
_TILES_OF_WORD, _WORD_BYTES = 32, 8


@dataclass(frozen=True)
class MaskLists:
    """Of a pass whose kernel passes over the tiles that a mask hides; none without a mask of keys.

    Attributes
    ----------
    problem, limits, arithmetic
        Those of the pass.
    block_q, block_kv
        Of its tiles.
    """

    problem: AttentionProblem
    limits: DeviceLimits
    arithmetic: Arithmetic
    block_q: int
    block_kv: int

    @property
    def constants(self) -> dict[str, int]:
        """What the device code of the pass reads from ``Config``."""
        one = self.listed and self._one_row
        return {"listed": int(self.of_each_tile), "one_list": int(one)}

    @property
    def of_each_tile(self) -> bool:
        """Whether tiles have lists of their own that the pass walks along."""
        return self.listed and not (self._backward and self._one_row)

    @property
    def listed(self) -> bool:
        """Whether there are lists: of each q or kv tile, or one of kv tiles for all queries.

        Ordered sums of dQ count all tiles.
        """
        mask = self.problem.operands.get("mask")
        ordered = self._backward and self.problem.deterministic
        return mask is not None and mask.pairs[3] > 1 and 0 not in mask.shape and not ordered

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """Buffers of the workspace and their bytes."""
        return [("tile_bits", self._words * _WORD_BYTES)] if self.listed else []

    @property
    def before(self) -> Iterator[KernelLaunch]:
        """What makes them."""
        if not self.listed:
            return
        by_keys = self._backward and not self._one_row
        tile = steps.SummaryTile(self.block_q, self.block_kv, by_keys, self._one_row)
        config = kernel_config(
            self.problem,
            self.limits,
            ("steps", "summarise_mask"),
            self.arithmetic,
            tile.constants(),
            tile.footprint,
        )
        # Nothing else changes its code.
        config = replace(config, storage="float32", output="float32", compute="float32")
        config = replace(config, statistics="float32", mask="full", copies="element", features=())
        config = replace(config, head_dim=0, head_dim_v=0, products="scalar", mma_depth=0)
        heads = self.problem.operands["mask"].pairs[1]
        grid = launchable(self._words, "the summary of mask")
        yield KernelLaunch(config, grid, (("mask_heads", heads),))

    @property
    def _backward(self) -> bool:
        return self.problem.operation == "backward"

    @property
    def _one_row(self) -> bool:
        """Whether the mask is the same for all queries."""
        mask = self.problem.operands.get("mask")
        return mask is not None and mask.pairs[2] == 1

    @property
    def _words(self) -> int:
        entries, heads, _, _ = self.problem.operands["mask"].pairs
        q_tiles = ceil_div(self.problem.seqlen_q, self.block_q)
        rows, along = q_tiles, ceil_div(self.problem.seqlen_kv, self.block_kv)
        if self._one_row:
            rows = 1
        elif self._backward:
            rows, along = along, rows
        return entries * heads * rows * ceil_div(along, _TILES_OF_WORD)

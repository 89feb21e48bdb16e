"""The kernel that runs before a pass and turns a boolean mask into bits of tiles and of pairs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import UnsupportedError
from .device import DeviceLimits
from .kernel import KernelLaunch, bare_config
from .problem import AttentionProblem
from .row_steps import launchable
from .tiles import steps
from .tiles.common import Arithmetic, ceil_div

__all__ = ["MaskBits"]

#: Number of tiles of a word, and its bytes. A tile has two bits: one says that some of it is seen,
#: the other that all of it is seen.
_TILES_OF_WORD, _WORD_BYTES = 32, 8
#: Bits of pairs: the lines of a warp, its lanes, the bytes of a lane's record for a tile, and the
#: largest number of records.
_LINES, _LANES, _LANE_BYTES, _MOST_OF_LANES = 16, 32, 8, 2**32


@dataclass(frozen=True)
class MaskBits:
    """The bits of a FlashAttention-3 pass; none without a mask that varies along keys.

    A line is a query in a forward pass, and a key in a backward pass; all
    tiles in a row of tiles have the same lines.

    Attributes
    ----------
    problem, limits, arithmetic
        Those of the pass.
    block_q, block_kv
        Queries and keys of its tiles.
    """

    problem: AttentionProblem
    limits: DeviceLimits
    arithmetic: Arithmetic
    block_q: int
    block_kv: int

    @property
    def constants(self) -> dict[str, int]:
        """Constants that the device code of the pass reads from ``Config``."""
        return {
            "packed": int(self._packed),
            "one_row": int(self._packed and self._one_row),
            "listed": int(self.of_each_tile),
            "skips_keys": int(self._listed and not self.of_each_tile),
        }

    @property
    def of_each_tile(self) -> bool:
        """Whether the pass visits only the tiles whose bits are set."""
        return self._listed and not (self._backward and self._one_row)

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """Buffers of the workspace and their bytes.

        Raises
        ------
        UnsupportedError
            If there are too many bits of pairs for the 32-bit counts of kernels.
        """
        if not self._packed:
            return []
        lines = self._rows * ceil_div(self._lines_of_row, _LINES)
        of_lanes = self._arrays * lines * self._along * _LANES
        if of_lanes > _MOST_OF_LANES:
            raise UnsupportedError(
                f"fa3 would need {of_lanes:,} records for the bits of mask, "
                f"it can count {_MOST_OF_LANES:,}"
            )
        pairs = ("pair_bits", of_lanes * _LANE_BYTES)
        return [("tile_bits", self._words * _WORD_BYTES), pairs] if self._listed else [pairs]

    @property
    def before(self) -> Iterator[KernelLaunch]:
        """The kernel that writes the bits."""
        if not self._packed:
            return
        tile = steps.SummaryTile(
            self.block_q, self.block_kv, self._backward, self._one_row, self._listed
        )
        config = bare_config(
            self.problem,
            self.limits,
            ("steps", "summarise_mask"),
            self.arithmetic,
            tile.constants(),
            tile.footprint,
        )
        heads = self.problem.operands["mask"].pairs[1]
        grid = launchable(self._words * steps.BLOCKS_OF_WORD, "the summary of mask")
        yield KernelLaunch(config, grid, (("mask_heads", heads),))

    @property
    def _packed(self) -> bool:
        mask = self.problem.operands.get("mask")
        return mask is not None and mask.pairs[3] > 1 and 0 not in mask.shape

    @property
    def _listed(self) -> bool:
        """Whether tiles have bits: ordered sums of dQ visit all tiles and need none."""
        return self._packed and not (self._backward and self.problem.deterministic)

    @property
    def _backward(self) -> bool:
        return self.problem.operation == "backward"

    @property
    def _one_row(self) -> bool:
        """Whether the mask is the same for all queries."""
        return self.problem.operands["mask"].pairs[2] == 1

    @property
    def _arrays(self) -> int:
        entries, heads, _, _ = self.problem.operands["mask"].pairs
        return entries * heads

    @property
    def _q_tiles(self) -> int:
        return 1 if self._one_row else ceil_div(self.problem.seqlen_q, self.block_q)

    @property
    def _kv_tiles(self) -> int:
        return ceil_div(self.problem.seqlen_kv, self.block_kv)

    @property
    def _rows(self) -> int:
        """Number of rows of tiles."""
        return self._kv_tiles if self._backward else self._q_tiles

    @property
    def _along(self) -> int:
        """Number of tiles of a row."""
        return self._q_tiles if self._backward else self._kv_tiles

    @property
    def _lines_of_row(self) -> int:
        if self._backward:
            return self.block_kv
        return _LINES if self._one_row else self.block_q

    @property
    def _words(self) -> int:
        return self._arrays * self._rows * ceil_div(self._along, _TILES_OF_WORD)

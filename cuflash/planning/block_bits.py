"""The kernel before a pass that turns a block mask into bits of tiles, which the pass reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .device import DeviceLimits
from .kernel import KernelLaunch, bare_config
from .mask_bits import MaskBits
from .problem import AttentionProblem
from .row_steps import launchable
from .tiles import steps
from .tiles.common import Arithmetic, ceil_div

__all__ = ["BlockBits", "bits_of_tiles"]

#: Tiles of a word, and its bytes. A tile has two bits: some of it is seen, and all of it is seen.
_TILES_OF_WORD, _WORD_BYTES = 32, 8


@dataclass(frozen=True)
class BlockBits:
    """The bits of tiles of a FlashAttention-3 pass with a block mask.

    A row of tiles belongs to a q tile in a forward pass, and to a kv tile in a
    backward pass. Ordered sums of dQ visit all tiles, so such a pass has no bits.

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
        return {"packed": 0, "one_row": 0, "listed": int(self.of_each_tile), "skips_keys": 0}

    @property
    def of_each_tile(self) -> bool:
        """Whether the pass visits only the tiles whose bits are set."""
        blocks = self.problem.operands["block_mask"]
        return 0 not in blocks.shape and not (self._backward and self.problem.deterministic)

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """Buffers of the workspace and their bytes."""
        return [("block_bits", self._words * _WORD_BYTES)] if self.of_each_tile else []

    @property
    def before(self) -> Iterator[KernelLaunch]:
        """The kernel that writes the bits."""
        if not self.of_each_tile:
            return
        tile = steps.ListTile(self.block_q, self.block_kv, self.problem.block, self._backward)
        config = bare_config(
            self.problem,
            self.limits,
            ("steps", "list_blocks"),
            self.arithmetic,
            tile.constants(),
            tile.footprint,
        )
        heads = self.problem.operands["block_mask"].pairs[1]
        blocks = ceil_div(self._words, tile.words)
        yield KernelLaunch(
            config,
            launchable(blocks, "the bits of block_mask"),
            (("block_heads", heads), ("block_words", self._words)),
        )

    @property
    def _backward(self) -> bool:
        return self.problem.operation == "backward"

    @property
    def _words(self) -> int:
        entries, heads, _, _ = self.problem.operands["block_mask"].pairs
        tiles = [
            ceil_div(self.problem.seqlen_q, self.block_q),
            ceil_div(self.problem.seqlen_kv, self.block_kv),
        ]
        rows, along = tiles[::-1] if self._backward else tiles
        return entries * heads * rows * ceil_div(along, _TILES_OF_WORD)


def bits_of_tiles(
    problem: AttentionProblem,
    limits: DeviceLimits,
    arithmetic: Arithmetic,
    block_q: int,
    block_kv: int,
) -> MaskBits | BlockBits:
    """Return the bits of tiles of a pass: of ``mask`` if it has any, else of the block mask."""
    of_mask = MaskBits(problem, limits, arithmetic, block_q, block_kv)
    if of_mask.constants["packed"] or "block_mask" not in problem.operands:
        return of_mask
    return BlockBits(problem, limits, arithmetic, block_q, block_kv)

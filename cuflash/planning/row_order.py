"""When sums of dQ are cleared and rounded by the blocks that multiply other rows."""

from __future__ import annotations

from dataclasses import dataclass

from .tiles.common import ceil_div

__all__ = ["RowOrder"]

#: Blocks for each multiprocessor between what is made and what needs it: those that run. Sums are
#: cleared as soon as a block begins, and added to until it ends, so that hardly any waits.
_ROUNDS = 1


@dataclass(frozen=True)
class RowOrder:
    """The order of the blocks of ``cuda_src/fa3/backward.cu``; distances in kv tiles.

    Attributes
    ----------
    heads
        Heads of keys of all batch entries.
    tiles
        Tiles of a head's keys.
    head_group
        Heads whose tiles come together: any block of them needs what blocks
        have cleared for all their tiles.
    tiles_of_round
        Blocks of tiles in a round, before which a block of rows comes; 0: there
        are none.
    num_sms
        Multiprocessors, each with a block at a time.
    clears
        Whether blocks clear sums of later ones. Where they stay they do not: a
        block would wait for one that may not run yet.
    """

    heads: int
    tiles: int
    head_group: int
    tiles_of_round: int
    num_sms: int
    clears: bool = True

    @property
    def heads_ahead(self) -> int:
        """The first heads, whose sums no block clears: whole head groups."""
        if not self.clears:
            return self.heads
        of_head_group = self.tiles * self.head_group
        head_groups = ceil_div(of_head_group + _ROUNDS * self.num_sms, of_head_group)
        return min(self.heads, head_groups * self.head_group)

    @property
    def ahead(self) -> int:
        """From the tile of a block to the one whose rows' sums it clears."""
        return self.heads_ahead * self.tiles

    @property
    def convert_lag(self) -> int:
        """From the first tile of a round back to the first whose rows are finished meanwhile.

        Far enough that all of its head's tiles come before the round; where
        there are no more tiles, that no round finishes any. Of blocks of rows.
        """
        far = self.tiles * self.head_group + self.tiles_of_round + _ROUNDS * self.num_sms
        return min(far, self._rounds * self.tiles_of_round)

    @property
    def blocks(self) -> int:
        """Those of the rounds, and one for every share that is left."""
        if self.tiles_of_round == 0:
            return self.heads * self.tiles
        left = self.heads * self.tiles + self.convert_lag - self._rounds * self.tiles_of_round
        return self._rounds * (self.tiles_of_round + 1) + left

    @property
    def _rounds(self) -> int:
        return ceil_div(self.heads * self.tiles, self.tiles_of_round)

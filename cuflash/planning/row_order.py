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
    section
        Heads whose tiles come together: any block of a section needs what
        blocks have cleared for all its tiles.
    shares
        Blocks of tiles in a round, before which a block of rows comes; 0: there
        are none.
    num_sms
        Multiprocessors, each with a block at a time.
    """

    heads: int
    tiles: int
    section: int
    shares: int
    num_sms: int

    @property
    def heads_ahead(self) -> int:
        """The first heads, whose sums no block clears: whole sections of them."""
        of_section = self.tiles * self.section
        sections = ceil_div(of_section + _ROUNDS * self.num_sms, of_section)
        return min(self.heads, sections * self.section)

    @property
    def ahead(self) -> int:
        """From the tile of a block to the one whose rows' sums it clears."""
        return self.heads_ahead * self.tiles

    @property
    def behind(self) -> int:
        """From the first tile of a round back to the first whose rows are finished meanwhile.

        Far enough that all of its head's tiles come before the round; where
        there are no more tiles, that no round finishes any. Of blocks of rows.
        """
        far = self.tiles * self.section + self.shares + _ROUNDS * self.num_sms
        return min(far, self._rounds * self.shares)

    @property
    def blocks(self) -> int:
        """Those of the rounds, and one for every share that is left."""
        if self.shares == 0:
            return self.heads * self.tiles
        left = self.heads * self.tiles + self.behind - self._rounds * self.shares
        return self._rounds * (self.shares + 1) + left

    @property
    def _rounds(self) -> int:
        return ceil_div(self.heads * self.tiles, self.shares)

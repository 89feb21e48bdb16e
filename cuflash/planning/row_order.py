"""The order in which blocks of a backward pass clear and convert sums of dQ of other rows."""

from __future__ import annotations

from dataclasses import dataclass

from .key_parts import ONE_PART, Parts
from .tiles.common import ceil_div

__all__ = ["RowOrder"]

#: Blocks for each multiprocessor between a block that writes and a block that needs its result: as
#: many as run at once. A block clears sums when it begins, and adds to sums until it ends: at this
#: distance hardly any block waits.
_ROUNDS = 1


@dataclass(frozen=True)
class RowOrder:
    """The order of the blocks of ``cuda_src/fa3/backward.cu``; distances in kv tiles.

    Attributes
    ----------
    heads
        Kv heads of all batch entries.
    tiles
        Kv tiles of a head.
    head_group
        Heads whose tiles run together: every block of the head group needs the
        sums that earlier blocks clear for the whole head group.
    tiles_of_round
        Blocks with a kv tile in a round; one block before them converts rows. 0:
        no rounds.
    num_sms
        Multiprocessors, each with a block at a time.
    clears
        Whether blocks clear sums of later blocks. If a block computes several kv
        tiles, it does not: it would wait for a block that may not run yet. Nor does
        it if several blocks cut the steps of every tile: none has all rows of a head.
    shared
        How blocks share a kv tile. Where every tile has parts, they count as heads.
    """

    heads: int
    tiles: int
    head_group: int
    tiles_of_round: int
    num_sms: int
    clears: bool = True
    shared: Parts = ONE_PART

    @property
    def heads_ahead(self) -> int:
        """Number of first heads whose sums no block clears: whole head groups."""
        if not self.clears:
            return self.heads
        of_head_group = self.tiles * self.head_group
        head_groups = ceil_div(of_head_group + _ROUNDS * self.num_sms, of_head_group)
        return min(self.heads, head_groups * self.head_group)

    @property
    def ahead(self) -> int:
        """Distance from the tile of a block to the tile whose sums it clears."""
        return self.heads_ahead * self.tiles

    @property
    def convert_lag(self) -> int:
        """Distance from the first tile of a round back to the first tile whose rows it converts.

        It is so large that all tiles of that head run before the round. If there are
        too few tiles for that, no round converts rows.
        """
        far = self.tiles * self.head_group + self.tiles_of_round + _ROUNDS * self.num_sms
        return min(far, self._tiles_of_rounds)

    @property
    def blocks(self) -> int:
        """Number of blocks: those of the rounds, and one for every tile whose rows are left."""
        if self.tiles_of_round == 0:
            return self._places
        left = self.heads * self.tiles + self.convert_lag - self._tiles_of_rounds
        return self._rounds * (self.tiles_of_round + 1) + left

    @property
    def _rounds(self) -> int:
        return ceil_div(self._places, self.tiles_of_round)

    @property
    def _tiles_of_rounds(self) -> int:
        """Number of tiles that full rounds would have."""
        return self._tile_at(self._rounds * self.tiles_of_round)

    @property
    def _places(self) -> int:
        """Number of blocks with a tile or a part of one."""
        shared = self.shared
        return self.heads * self.tiles + shared.last * (shared.number - 1)

    def _tile_at(self, place: int) -> int:
        """Return the tile of a block, from its place among the blocks with a tile."""
        whole = self.heads * self.tiles - self.shared.last
        beyond = max(0, place - whole)
        return place - beyond + beyond // (self.shared.number if self.shared.last else 1)

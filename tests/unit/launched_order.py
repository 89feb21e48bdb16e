"""What a block of FlashAttention-3's backward pass does, from its number and the parameters.

Computed again as in ``cuda_src/fa3/backward_clear.cuh`` (``clear_role``),
``cuda_src/fa3/backward_rows.cuh`` (``BlockPlace``), ``cuda_src/fa3/backward_parts.cuh``
(``PlacedTile``) and ``cuda_src/tile/schedule.cuh``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cuflash.planning.key_parts import ONE_PART, Parts
from cuflash.planning.row_order import RowOrder

__all__ = ["Launched", "launched"]


@dataclass(frozen=True)
class Launched:
    """The kernel's parameters, and the multiprocessors that run it."""

    heads: int  # heads of keys in all batch entries
    tiles: int  # tiles of each head
    head_group: int
    tiles_of_round: int  # 0: there are no blocks of rows
    grid: int
    ahead: int
    convert_lag: int
    num_sms: int
    shared: Parts = ONE_PART  # blocks of each of the last tiles

    @property
    def every(self) -> int:
        """Tiles of all heads."""
        return self.heads * self.tiles

    @property
    def places(self) -> int:
        """Blocks that have a tile, or a part of one."""
        return self.every + self.shared.last * (self.shared.number - 1)

    @property
    def rounds(self) -> int:
        """The number of rounds; each is a block of rows and then the blocks of several tiles."""
        return -(-self.places // self.tiles_of_round) if self.tiles_of_round else 0

    @property
    def after_all(self) -> int:
        """The first block after the rounds, or after the tiles if there are no rounds."""
        return self.rounds * (self.tiles_of_round + 1) or self.places

    def head(self, tile: int) -> int:
        """The head of a tile, by its position in the order; ``TileOrder::place``."""
        first = tile // (self.head_group * self.tiles) * self.head_group
        width = min(self.head_group, self.heads - first)
        return first + (tile - first * self.tiles) % width

    def tile_at(self, place: int) -> int:
        """The tile at a place among the blocks with a tile; ``PlacedTile``."""
        whole = self.every - self.shared.last
        return place if place < whole else whole + (place - whole) // self.shared.number

    def tile(self, block: int) -> int | None:
        """The tile of a block; None for a block of rows, or if the block has nothing to do."""
        if self.tiles_of_round == 0:
            return self.tile_at(block)
        number, within = divmod(block, self.tiles_of_round + 1)
        place = number * self.tiles_of_round + within - 1
        has_tile = number < self.rounds and within > 0 and place < self.places
        return self.tile_at(place) if has_tile else None

    def finished(self, block: int) -> range:
        """Tiles whose shares of the rows a block of rows finishes."""
        number, within = divmod(block, self.tiles_of_round + 1)
        place = min(number, self.rounds) * self.tiles_of_round
        begin = self.tile_at(place) - self.convert_lag
        most = self.tile_at(place + self.tiles_of_round) - self.tile_at(place)
        if number >= self.rounds:
            begin += block - self.rounds * (self.tiles_of_round + 1)
            most = 1
        elif within > 0:
            most = 0
        first = max(begin, 0)
        return range(first, first + max(min(begin + most, self.every) - first, 0))

    def of_tiles(self) -> list[tuple[int, int]]:
        """Tiles that are multiplied, each with its block."""
        found = ((self.tile(block), block) for block in range(self.grid))
        return [(tile, block) for tile, block in found if tile is not None]

    def of_rows(self) -> Iterator[tuple[int, range]]:
        """Blocks without a tile, and the shares that each of them finishes."""
        for block in range(self.grid):
            if self.tile(block) is None:
                yield block, self.finished(block)

    def clearing(self) -> Iterator[tuple[int, int]]:
        """Tiles whose shares of the rows are cleared, each with the block that does it."""
        for tile, block in self.of_tiles():
            if tile + self.ahead < self.every:
                yield tile + self.ahead, block

    def first_and_last(self) -> dict[int, tuple[int, int]]:
        """The blocks of the first and of the last of each head's tiles."""
        found: dict[int, tuple[int, int]] = {}
        for tile, block in self.of_tiles():
            first, last = found.get(self.head(tile), (block, block))
            found[self.head(tile)] = min(first, block), max(last, block)
        return found


def launched(order: RowOrder) -> Launched:
    behind = order.convert_lag if order.tiles_of_round else 0
    of = order.heads, order.tiles, order.head_group, order.tiles_of_round, order.blocks
    return Launched(*of, order.ahead, behind, order.num_sms, order.shared)

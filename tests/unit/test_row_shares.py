"""Each kv tile's share of the rows of dQ in FlashAttention-3's backward pass.

This file repeats ``store_zeros_of`` of ``cuda_src/fa3/backward_clear.cuh``, which
clears the rows, and ``RowUnits`` of ``cuda_src/fa3/backward_rows.cuh``, which
rounds them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash.planning.tiles import fa3
from cuflash.planning.tiles.fa3_tables import BACKWARD, BackwardRow

from .test_plan_fa3 import planned
from .test_plan_fa3_backward import of_gradients


@dataclass(frozen=True)
class Shared:
    """The rows of the heads of a group, and the kv tiles that share them."""

    seqlen_q: int
    tiles: int
    group: int
    block_q: int = 64

    @property
    def of_head(self) -> int:
        """The number of units, of 16 rows each, of a query head to which kv tiles add."""
        return -(-self.seqlen_q // self.block_q) * (self.block_q // 16)

    @property
    def of_share(self) -> int:
        """The units of a tile's share of a query head."""
        return -(-self.of_head // self.tiles)

    @property
    def every(self) -> set[tuple[int, int]]:
        """The query head, by its number in the group, and the first row of every unit."""
        return set(product(range(self.group), range(0, self.of_head * 16, 16)))

    def cleared(self, tile: int, row_bytes: int, zero_bytes: int) -> Iterator[tuple[int, int]]:
        """The query head, and the first byte of the target, of each copy that a tile makes."""
        begin = tile * self.of_share
        units = min(self.of_share, self.of_head - begin)
        for head in range(self.group):
            for copy in range(units * (16 * row_bytes // zero_bytes)):
                yield head, begin * 16 * row_bytes + copy * zero_bytes

    def finished(self, shares: range) -> Iterator[tuple[int, int]]:
        """The query head and the first row of each unit in the shares of some tiles."""
        for i in range(len(shares) * self.of_share * self.group):
            heads = i // self.of_share
            before = heads // self.group
            row = shares[before] * self.of_share * 16 + (i - heads * self.of_share) * 16
            if row < self.seqlen_q:
                yield heads - before * self.group, row


SHARED = st.builds(
    Shared,
    st.integers(1, 2000),
    st.integers(1, 40),
    st.integers(1, 5),
    st.sampled_from((64, 128)),
)
thoroughly = settings(max_examples=200)


@thoroughly
@given(SHARED, st.sampled_from(BACKWARD))
def test_copies_of_zeros_cover_every_row_once(shared: Shared, row: BackwardRow) -> None:
    """They cover all rows to which kv tiles add, and none of another head, which may be in use."""
    row_bytes, zero_bytes = row.widest * 4, row.zero_bytes
    copies = Counter(
        copy for t in range(shared.tiles) for copy in shared.cleared(t, row_bytes, zero_bytes)
    )
    end = shared.of_head * 16 * row_bytes
    assert copies == dict.fromkeys(product(range(shared.group), range(0, end, zero_bytes)), 1)
    assert end % zero_bytes == 0
    assert shared.of_head * 16 >= shared.seqlen_q
    assert shared.of_head * 16 <= -(-shared.seqlen_q // 128) * 128  # the workspace has these rows


@thoroughly
@given(SHARED, st.integers(1, 9))
def test_blocks_of_rows_finish_every_row_once(shared: Shared, shares: int) -> None:
    """A block may have any number of tiles, and there may be more tiles than units, or fewer."""
    blocks = (range(t, min(t + shares, shared.tiles)) for t in range(0, shared.tiles, shares))
    done = Counter(unit for block in blocks for unit in shared.finished(block))
    assert done == dict.fromkeys((u for u in shared.every if u[1] < shared.seqlen_q), 1)


@pytest.mark.parametrize("row", BACKWARD, ids=str)
def test_units_and_copies_are_of_the_tile_that_is_chosen(row: BackwardRow) -> None:
    """A unit is a row of fragments; each lane of a warp writes 16 bytes of zeros."""
    tile = planned(of_gradients(head_dim=row.widest, head_dim_v=row.widest_v)).tile
    assert isinstance(tile, fa3.Fa3BackwardTile)
    constants = tile.constants()
    assert tile.block_q in (64, 128)
    assert constants["fragment_rows"] == 16
    assert constants["zero_bytes"] % (32 * 16) == 0
    assert 16 * tile.head_dim * 4 % constants["zero_bytes"] == 0

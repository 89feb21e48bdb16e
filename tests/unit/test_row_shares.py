"""The rows of FlashAttention-3's backward pass that blocks of rows have, a kv tile's share each.

``RowUnits`` of ``cuda_src/fa3/backward_rows.cuh`` is written down here once more.
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

from .test_plan_fa3 import planned
from .test_plan_fa3_backward import of_gradients


@dataclass(frozen=True)
class Shared:
    """The rows of the heads of a group, and the kv tiles that share them; ``RowUnits``."""

    seqlen_q: int
    tiles: int
    group: int
    block_q: int = 64

    @property
    def of_head(self) -> int:
        """Units of 16 rows of a query head, as far as kv tiles read."""
        return -(-self.seqlen_q // self.block_q) * (self.block_q // 16)

    @property
    def of_share(self) -> int:
        """Those that a tile has of a query head."""
        return -(-self.of_head // self.tiles)

    def rows(self, shares: range) -> Iterator[tuple[int, int]]:
        """Query head of the group and first row of each unit of some tiles, by its number."""
        for i in range(len(shares) * self.of_share * self.group):
            heads = i // self.of_share
            before = heads // self.group
            row = shares[before] * self.of_share * 16 + (i - heads * self.of_share) * 16
            if row < self.of_head * 16:
                yield heads - before * self.group, row


@settings(max_examples=200)
@given(
    st.builds(Shared, st.integers(1, 2000), st.integers(1, 40), st.integers(1, 5)),
    st.integers(1, 9),
)
def test_shares_cover_every_row_once(shared: Shared, shares: int) -> None:
    """However many tiles a block does, and whether there are more of them than units, or fewer."""
    blocks = (range(t, min(t + shares, shared.tiles)) for t in range(0, shared.tiles, shares))
    done = Counter(unit for block in blocks for unit in shared.rows(block))
    rows = range(0, shared.of_head * 16, 16)
    assert done == dict.fromkeys(product(range(shared.group), rows), 1)
    assert rows[-1] + 16 >= shared.seqlen_q
    assert rows[-1] + 16 <= -(-shared.seqlen_q // 128) * 128  # where the workspace has rows


@pytest.mark.parametrize("width", [96, 128])
def test_units_are_of_the_tile_that_is_chosen(width: int) -> None:
    tile = planned(of_gradients(width=width)).tile
    assert isinstance(tile, fa3.Fa3BackwardTile)
    assert tile.block_q == Shared(1, 1, 1).block_q
    assert dict(tile.constants())["fragment_rows"] == 16

"""Blocks that a caller of FlashAttention-2 asks for: taken, or refused with the nearest."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from cuflash.errors import ArgumentValueError, UnsupportedError

from ..architectures import LIMITS
from .test_plan import PLAIN, problem
from .test_plan_fa2 import PASSES, planned


def test_blocks_are_honoured() -> None:
    for operation, blocks in product(PASSES, ((32, 32), (64, 48), (16, 64))):
        chosen = planned(problem(operation=operation), LIMITS["90"], blocks=blocks)
        assert (chosen.tile.block_q, chosen.tile.block_kv) == blocks
        assert "as asked" in chosen.reason


@pytest.mark.parametrize("operation", PASSES)
def test_blocks_that_do_not_fit_name_the_nearest(operation: str) -> None:
    wide = problem(operation=operation, head_dim=256, head_dim_v=256)
    for blocks in ((128, 256), (2**20, 64), (2**30, 2**30)):
        with pytest.raises(ArgumentValueError, match="the nearest") as caught:
            planned(wide, LIMITS["80"], blocks=blocks)
        nearest = eval(caught.value.expected.split("nearest ")[1])
        tile = planned(wide, LIMITS["80"], blocks=nearest).tile
        assert (tile.block_q, tile.block_kv) == nearest
    for blocks, said in (((128, 256), "the device has 166,912"), ((99, 99), "multiples of 16")):
        with pytest.raises(ArgumentValueError, match=said):
            planned(wide, LIMITS["80"], blocks=blocks)


def test_blocks_where_nothing_fits_are_unsupported() -> None:
    tiny = replace(LIMITS["90"], shared_per_block=2048)
    for blocks in (None, (16, 16), (17, 16), (2**20, 16)):
        with pytest.raises(UnsupportedError, match=r"fa2 .*the smallest tile 16x16 needs"):
            planned(PLAIN, tiny, blocks=blocks)


def test_no_q_tile_reaches_into_the_next_head() -> None:
    """In the workspace of the backward pass, the rows of a head are a multiple of 128."""
    for blocks in ((48, 32), (96, 16), (256, 16)):
        with pytest.raises(ArgumentValueError, match="block_q a divisor of 128, the nearest"):
            planned(problem(operation="backward"), LIMITS["90"], blocks=blocks)
    assert planned(PLAIN, LIMITS["90"], blocks=(48, 32)).tile.block_q == 48

"""The problems for which FlashAttention-2's backward pass has scores as keys x queries."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from cuflash.planning.problem import DTYPES
from cuflash.planning.tiles import fa2
from cuflash.planning.tiles.common import HEAD_DIM_BUCKETS
from cuflash.planning.tiles.fa2_tables import BackwardRow

from ..architectures import LIMITS
from .test_plan import problem
from .test_plan_fa2 import LONG, planned

#: The widest heads whose backward pass has scores as keys x queries. Shared memory of 99 KiB holds
#: two blocks only for narrower heads, and 64 KiB only for the narrowest.
_KEYS_BY_QUERIES = {"75": 16, "80": 64, "86": 32, "89": 32, "90": 64, "100": 64, "120": 32}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("architecture", LIMITS)
def test_narrow_heads_have_scores_as_keys_by_queries(
    architecture: str, deterministic: bool
) -> None:
    limits = LIMITS[architecture]
    for d, dtype in product(HEAD_DIM_BUCKETS, DTYPES):
        if architecture == "75" and (dtype == "bfloat16" or (d, dtype) == (256, "float64")):
            continue
        changes = {"head_dim": d, "head_dim_v": d, "deterministic": deterministic, **LONG}
        tile = planned(problem(operation="backward", storage=dtype, **changes), limits).tile
        narrow = DTYPES[dtype].itemsize == 2 and d <= _KEYS_BY_QUERIES[architecture]
        assert tile.transposed == narrow
        if narrow:
            assert tile.kv_grid == (tile.warps, 1)
            stored = replace(tile, transposed=False).footprint.shared_bytes
            p = 2 * tile.block_q * tile.block_kv * 2  # two stages of P
            assert stored - tile.footprint.shared_bytes == p - 2 * 128  # each keeps one line


def test_keys_that_are_no_fragment_for_every_warp_are_passed_over() -> None:
    wanted = problem(operation="backward", **LONG)
    row = BackwardRow(64, 32, 32, 4, 2, 3, 2, True)
    assert not list(fa2._backward(wanted, LIMITS["90"], row))
    assert list(fa2._backward(wanted, LIMITS["90"], row._replace(transposed=False)))

"""Plans of forward passes for few queries."""

from __future__ import annotations

import pytest

from cuflash.planning.key_chunks import chunk_of
from cuflash.planning.plan import plan
from cuflash.planning.tiles.common import ceil_div
from cuflash.planning.tiles.fa2_few import Fa2FewTile

from ..architectures import LIMITS
from .test_forward_time import few

H200 = LIMITS["90"]


@pytest.mark.parametrize("keys", [2**26, 2**26 + 1, 2**29])
def test_few_queries_have_the_longest_chunk_for_any_number_of_keys(keys: int) -> None:
    chosen = plan(few(1, (1, 1), (1, keys), 64, storage="float16"), H200)
    assert isinstance(chosen.tile, Fa2FewTile)
    assert chunk_of(chosen.problem) == 2**20
    assert chosen.launches[0].grid == ceil_div(keys, 2**20)


def test_a_chunk_of_other_tiles_than_those_for_few_queries_has_the_usual_order() -> None:
    problem = few(2, (4, 2), (1, 1000), 64, storage="float16")
    assert isinstance(plan(problem, H200, kv_chunk=96).tile, Fa2FewTile)
    assert plan(problem, H200, kv_chunk=80).algorithm == "fa3"

"""Every width of q and k goes with every width of v."""

from __future__ import annotations

from itertools import product

import pytest

from cuflash.errors import UnsupportedError
from cuflash.planning.plan import plan
from cuflash.planning.tiles.common import HEAD_DIM_BUCKETS

from ..architectures import LIMITS
from .test_plan import problem


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("architecture", LIMITS)
def test_every_pair_of_widths_has_a_tile(architecture: str, operation: str) -> None:
    """The only exception is float64 in the 64 KiB of sm_75 where both widths exceed 192."""
    missing = set()
    for storage, d, dv in product(("float16", "float32", "float64"), *[HEAD_DIM_BUCKETS] * 2):
        wanted = problem(operation=operation, storage=storage, head_dim=d, head_dim_v=dv)
        try:
            plan(wanted, LIMITS[architecture], algorithm="fa1")
        except UnsupportedError:
            missing.add((storage, d, dv))
    assert missing == ({("float64", 256, 256)} if architecture == "75" else set())

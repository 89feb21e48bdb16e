"""Split keys, packed groups and tiles for few queries on the emulated device."""

from __future__ import annotations

import numpy as np
import pytest

from ..kit.split_keys import ROWS, Row
from .build import compiler
from .host_cupy import host_cupy

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with"),
    pytest.mark.few_tiles,
]

#: The workspace before a call: NaN in every type.
_POISON = np.full(1 << 23, 0xFF, np.uint8)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_against_float64(row: Row) -> None:
    """With few multiprocessors a block has several items, some of them without keys."""
    with host_cupy("90", 3) as host:
        row.check(host.call, host.array, lambda array: array.peek(), workspace=host.array(_POISON))

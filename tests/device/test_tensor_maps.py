"""Tensor maps on a device: maps of the driver, and copies of them with another address."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cuflash.cuda.tensor_map import WORDS, TensorMapEncoder

from .common import skip_without


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rows", [64, 112])
def test_a_map_is_what_the_driver_makes(cp: Any, dtype: Any, rows: int) -> None:
    """Addresses near and far, with every alignment that a map may have."""
    skip_without("fa3")
    encoder = TensorMapEncoder(dtype, (2, 1000, 4, 96), (1_000_000, 512, 128), rows)
    pool = [cp.empty(4096, cp.uint8) for _ in range(4)]
    far = [cp.cuda.Memory(size) for size in (4096, 1 << 20, 1 << 28, 1 << 32)]
    places = [*(a.data.ptr for a in pool), *(memory.ptr for memory in far), 0x7FFF_FFFF_F000]
    first = pool[0].data.ptr  # after the first addresses the driver is not asked for similar ones
    for address in (first + 16, *(a + n for a in places for n in (0, 16, 32, 48, 128, 272, 4080))):
        room = np.zeros(WORDS, np.uint64)
        encoder.write(address, room)
        assert (room == encoder._make(address)).all(), hex(address)
    assert encoder._address_word is not None, "the driver is asked for every map"
    assert encoder._alignment == 16

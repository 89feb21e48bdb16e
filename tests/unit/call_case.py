"""Calls on a fake device, and a count of the calls that the cache does not answer."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from cuflash import dispatch

from .fake_device import ADDRESS, FakeDevice, device_array

__all__ = ["ROWS", "SHAPE", "Decided", "decided", "qkv"]

SHAPE = (2, 100, 4, 64)
ROWS = (2, 4, 100)


class Decided:
    """Counts the calls that reach ``dispatch.run``, and keeps the last arrays that CuPy made."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        import cupy

        self.count = 0
        self.made: deque[Any] = deque(maxlen=9)
        self._places = iter(range(1 << 40, 1 << 50, 1 << 24))
        patch.setattr(cupy, "empty", self._empty)
        self._run = dispatch.run
        patch.setattr(dispatch, "run", self)

    def _empty(self, shape: Any, dtype: Any = float) -> Any:
        self.made.append(device_array(shape, dtype, next(self._places)))
        return self.made[-1]

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        self.count += 1
        return self._run(*arguments, **keywords)


@pytest.fixture
def decided(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> Decided:
    """The count for a fake device, which gives every new array an address of its own."""
    return Decided(monkeypatch)


def qkv(number: int = 0, dtype: Any = np.float16, **changed: Any) -> dict[str, Any]:
    """Inputs at addresses that differ for every ``number``."""
    places = {name: ADDRESS * (4 * number + i + 1) for i, name in enumerate("qkv")}
    return {n: device_array(SHAPE, dtype, place) for n, place in places.items()} | changed

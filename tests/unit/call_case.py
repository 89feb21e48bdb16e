"""Calls on a fake device, and a count of the calls that the cache does not answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cuflash import dispatch

from .fake_device import ADDRESS, FakeDevice, device_array

__all__ = ["ROWS", "SHAPE", "Decided", "decided", "qkv"]

SHAPE = (2, 100, 4, 64)
ROWS = (2, 4, 100)


class Decided:
    """Counts the calls that reach ``dispatch.run``."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._run = dispatch.run
        patch.setattr(dispatch, "run", self)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        self.count += 1
        return self._run(*arguments, **keywords)


@pytest.fixture
def decided(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> Decided:
    """The count for a fake device."""
    return Decided(monkeypatch)


def qkv(number: int = 0, dtype: Any = np.float16, **changed: Any) -> dict[str, Any]:
    """Inputs at addresses that differ for every ``number``."""
    places = {name: ADDRESS * (4 * number + i + 1) for i, name in enumerate("qkv")}
    return {n: device_array(SHAPE, dtype, place) for n, place in places.items()} | changed

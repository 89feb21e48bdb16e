"""Marks every test of this folder, and gives them CuPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from .common import Hog


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "device":
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def cp() -> Any:
    """CuPy, imported only for tests that run."""
    import cupy

    return cupy


@pytest.fixture(autouse=True)
def _on_the_first_device(cp: Any) -> None:
    """Make the first device current: another library in the process may have changed it."""
    cp.cuda.runtime.setDevice(0)


@pytest.fixture
def hog(cp: Any) -> Iterator[Hog]:
    """A load that takes the device's bandwidth while a test runs."""
    hog = Hog(cp)
    yield hog
    hog.stream.synchronize()


@pytest.fixture
def problem(cp: Any) -> dict[str, Any]:
    """Arrays of a small problem on the device, float16, grouped heads."""
    rng = np.random.default_rng(11)

    def normal(*shape: int) -> Any:
        return cp.asarray(rng.standard_normal(shape).astype(np.float16))

    return {"q": normal(2, 300, 4, 64), "k": normal(2, 333, 2, 64), "v": normal(2, 333, 2, 64)}

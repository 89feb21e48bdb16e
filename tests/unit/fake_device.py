"""A CUDA device for the host side only: plans and launches are made, and nothing runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cuflash import pipeline, prepared
from cuflash.cuda import launch
from cuflash.cuda.compile import CompiledKernel

from ..architectures import LIMITS

__all__ = ["FakeDevice", "device_array", "fake_device"]

#: Where arrays begin, unless said otherwise: a multiple of 256.
ADDRESS = 1 << 20


class FakeDevice:
    """What a run asked of the driver, in order."""

    def __init__(self) -> None:
        self.entered: list[tuple[str, int]] = []
        self.launched: list[Any] = []

    def kernel(self, grid: Any, block: Any, arguments: tuple[Any, ...], shared_mem: int) -> None:
        """Stands for a RawKernel."""
        self.launched.append(arguments[0][0].copy())

    @contextlib.contextmanager
    def device(self, device_id: int) -> Iterator[None]:
        """Stands for cupy.cuda.Device."""
        self.entered.append(("device", device_id))
        yield

    @contextlib.contextmanager
    def stream(self, address: int, device_id: int = -1) -> Iterator[None]:
        """Stands for cupy.cuda.ExternalStream."""
        self.entered.append((f"stream {address}", device_id))
        yield


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """Two devices with the limits of sm_90."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    fake = FakeDevice()
    monkeypatch.setattr(pipeline.DeviceLimits, "query", lambda device_id: LIMITS["90"])
    for module in (pipeline, prepared):
        monkeypatch.setattr(module, "require_device", lambda: 0)
    monkeypatch.setattr(prepared, "device_count", lambda: 2)
    monkeypatch.setattr(pipeline, "is_usable", lambda: True)
    monkeypatch.setattr(pipeline, "require_toolchain", lambda: None)
    kernel = CompiledKernel(fake.kernel, 32, 0)
    monkeypatch.setattr(launch, "compile_kernel", lambda config, device_id: kernel)
    monkeypatch.setattr(cupy.cuda, "Device", fake.device)
    monkeypatch.setattr(cupy.cuda, "ExternalStream", fake.stream)
    pipeline._decide.cache_clear()
    yield fake
    pipeline._decide.cache_clear()


def device_array(shape: tuple[int, ...], dtype: Any = np.float16, address: int = ADDRESS) -> Any:
    """A CuPy array over memory that is never touched."""
    import cupy

    memory = cupy.cuda.UnownedMemory(address, 1 << 30, None, 0)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

"""A CUDA device for the host side only: plans and launches are made, and nothing runs."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cuflash import pipeline, prepared
from cuflash.cuda import launch, tensor_map
from cuflash.cuda.compile import CompiledKernel

from ..architectures import LIMITS

__all__ = ["COUNTER", "FakeDevice", "device_array", "fake_device"]

#: Where arrays begin, unless said otherwise: a multiple of 256.
ADDRESS = 1 << 20
#: Where every tile counter is.
COUNTER = 1 << 12


class FakeDevice:
    """What a run asked of the driver, in order."""

    def __init__(self) -> None:
        self.entered: list[tuple[str, int]] = []
        self.launched: list[Any] = []

    def kernel(self, grid: Any, block: Any, arguments: tuple[Any, ...], shared_mem: int) -> None:
        """Stands for a RawKernel."""
        self.launched.append(arguments[0][0].copy())

    def encode(self, words: Any, dtype: int, rank: int, address: Any, *others: Any) -> int:
        """Stands for cuTensorMapEncodeTiled: a map begins with the address of its tensor."""
        ctypes.c_uint64.from_address(words.value).value = address.value
        return 0

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
    monkeypatch.setattr(tensor_map, "_encode", lambda: fake.encode)
    monkeypatch.setattr(launch, "counter_of_launch", lambda device_id, workspace: COUNTER)
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

"""A fake CUDA device for the host code, which plans and launches, but runs no kernel."""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cuflash import calls, pipeline, prepared
from cuflash.cuda import current, launch, tensor_map
from cuflash.cuda.compile import CompiledKernel
from cuflash.cuda.parameters import struct_of
from cuflash.planning.kernel import KernelConfig

from ..architectures import LIMITS

__all__ = ["COUNTER", "FakeDevice", "device_array", "fake_device"]

#: The default address of arrays: a multiple of 256.
ADDRESS = 1 << 20
#: The address of every tile counter.
COUNTER = 1 << 12


class FakeDevice:
    """Records the requests to the driver, in order."""

    def __init__(self) -> None:
        self.entered: list[tuple[str, int]] = []
        self.launched: list[Any] = []
        self.queued: list[tuple[int, int]] = []  # device and stream of every launch
        self.contexts: list[int] = []  # devices passed to setDevice
        self.current = 0  # the current device
        self.streams = {0: 0, 1: 0}  # CuPy's current stream of every device
        self.capturing: set[int] = set()
        self.allocated: deque[Any] = deque(maxlen=9)  # the last memory that CuPy gave, and its size
        self._places = iter(range(1 << 40, 1 << 50, 1 << 24))
        self._kernels: list[KernelConfig] = []

    def allocate(self, nbytes: int) -> Any:
        """Replaces CuPy's memory pool: all memory has an address of its own."""
        import cupy

        memory = cupy.cuda.UnownedMemory(next(self._places), max(nbytes, 1), None, self.current)
        pointer = cupy.cuda.MemoryPointer(memory, 0)
        self.allocated.append((pointer, nbytes))
        return pointer

    def compiled(self, configs: Sequence[KernelConfig], device_id: int) -> list[CompiledKernel]:
        """Replaces compile_kernels."""
        before = len(self._kernels)
        self._kernels += configs
        return [CompiledKernel(None, before + i, 32, 0) for i in range(1, len(configs) + 1)]

    def launch(self, handle: int, *numbers: int) -> None:
        """Replaces cuLaunchKernel."""
        *shape, stream, parameters, extra = numbers
        config = self._kernels[handle - 1]
        assert shape[1:] == [1, 1, config.threads, 1, 1, config.shared_bytes]
        assert (shape[0] > 0, extra) == (True, 0)
        dtype = struct_of(config).dtype
        (place,) = (ctypes.c_void_p * 1).from_address(parameters)
        structure = ctypes.string_at(place, dtype.itemsize)
        self.launched.append(np.frombuffer(structure, dtype)[0])
        self.queued.append((self.current, stream))

    def encode(self, words: Any, dtype: int, rank: int, address: Any, *others: Any) -> int:
        """Replaces cuTensorMapEncodeTiled: a map begins with the address of its tensor."""
        ctypes.c_uint64.from_address(words.value).value = address.value
        return 0

    @contextlib.contextmanager
    def device(self, device_id: int) -> Iterator[None]:
        """Replaces cupy.cuda.Device."""
        self.entered.append(("device", device_id))
        before, self.current = self.current, device_id
        yield
        self.current = before

    @contextlib.contextmanager
    def stream(self, address: int, device_id: int = -1) -> Iterator[None]:
        """Replaces cupy.cuda.ExternalStream."""
        self.entered.append((f"stream {address}", device_id))
        yield

    def current_stream(self, device_id: int) -> Any:
        """Replaces cupy.cuda.get_current_stream."""
        return SimpleNamespace(ptr=self.streams[device_id])

    def patches(self, cupy: Any) -> list[tuple[Any, str, Any]]:
        """Every replacement: its owner, its name and its value."""
        runtime = cupy.cuda.runtime
        return [
            (pipeline.DeviceLimits, "query", lambda device_id: LIMITS["90"]),
            *((module, "require_device", lambda: 0) for module in (pipeline, prepared)),
            (prepared, "device_count", lambda: 2),
            (pipeline, "is_usable", lambda: True),
            (pipeline, "require_toolchain", lambda: None),
            (launch, "compile_kernels", self.compiled),
            (launch, "overlapping_launch", lambda: None),
            (launch, "counter_of_launch", lambda device_id, stream, workspace: COUNTER),
            (tensor_map, "_encode", lambda: self.encode),
            (current, "_thread", current._Thread()),
            (cupy.cuda, "Device", self.device),
            (cupy.cuda, "ExternalStream", self.stream),
            (cupy.cuda, "get_current_stream", self.current_stream),
            (cupy.cuda.driver, "launchKernel", self.launch),
            (runtime, "getDevice", lambda: self.current),
            (runtime, "setDevice", self.contexts.append),
            (runtime, "streamIsCapturing", self.capturing.__contains__),
        ]


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """Two devices with the limits of sm_90."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    fake = FakeDevice()
    for owner, name, value in fake.patches(cupy):
        monkeypatch.setattr(owner, name, value)
    calls.forget()
    cupy.cuda.set_allocator(fake.allocate)  # of all threads
    yield fake
    cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)
    calls.forget()


def device_array(shape: tuple[int, ...], dtype: Any = np.float16, address: int = ADDRESS) -> Any:
    """A CuPy array over memory that is never touched."""
    import cupy

    memory = cupy.cuda.UnownedMemory(address, 1 << 30, None, 0)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

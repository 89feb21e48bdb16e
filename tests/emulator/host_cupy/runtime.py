"""Devices, streams, the driver and graphs, as far as the library uses them."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cuflash.cuda.parameters import struct_of
from cuflash.planning.kernel import KernelConfig

from .array import Pointer, ndarray_of
from .memory import Block, Memory

__all__ = ["DriverError", "Launch", "Queued", "Runtime"]


class DriverError(RuntimeError):
    """Stands for cupy.cuda.driver.CUDADriverError."""


@dataclass(frozen=True)
class Launch:
    """A launch: the kernel, its parameters, and its stream and device."""

    config: KernelConfig
    parameters: Any  # a structure, as cuda.parameters describes it
    grid: int
    device: int
    stream: int
    replayed: bool  # whether a graph launched it
    lives: Mapping[Block, int]  # lives of all blocks at the time it was queued


@dataclass(frozen=True)
class Queued:
    """A queued operation: a launch of the library, a kernel of CuPy's or a copy."""

    what: str
    device: int
    stream: int
    blocks: tuple[Block, ...]
    launch: Launch | None = None


@dataclass
class Runtime:
    """The state of the driver, and a record of what was queued.

    Attributes
    ----------
    make
        Makes the kernel of a configuration. The kernel takes grid, threads, bytes of shared memory
        and the address of a list of addresses.
    audit
        Gets every launch before it runs.
    inside
        Whether the library is running; it owns what is allocated meanwhile.
    """

    make: Callable[[KernelConfig], Any]
    audit: Callable[[Launch], Any] = lambda launch: None
    devices: int = 2
    memory: Memory = field(default_factory=Memory)
    queue: list[Queued] = field(default_factory=list)
    inside: bool = False
    capturing: dict[int, list[Callable[[], None]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._current = 0
        self._streams = dict.fromkeys(range(self.devices), 0)
        self._kernels: list[tuple[KernelConfig, Any]] = []
        self.contexts: set[tuple[int, int]] = set()  # threads and devices
        self.ndarray: Any = ndarray_of(self)

    # Devices and streams.

    @property
    def device(self) -> int:
        """The current device."""
        return self._current

    def stream_of(self, device: int) -> int:
        """CuPy's current stream of a device."""
        return self._streams[device]

    @contextlib.contextmanager
    def on_device(self, device: int) -> Iterator[None]:
        before = self._current
        assert 0 <= device < self.devices
        if device != before:
            self.set_device(int(device))
        try:
            yield
        finally:
            self._current = before

    @contextlib.contextmanager
    def on_stream(self, stream: int, device: int = -1) -> Iterator[None]:
        device = self._current if device < 0 else device
        before, self._streams[device] = self._streams[device], stream
        try:
            yield
        finally:
            self._streams[device] = before

    def set_device(self, device: int) -> None:
        """cudaSetDevice: gives the thread the device's context."""
        self._current = device
        self.contexts.add((threading.get_ident(), device))

    # Memory.

    def allocate(self, nbytes: int) -> Pointer:
        """Memory on the current device and its stream; 0 bytes have address 0."""
        device = self._current
        if not nbytes:
            return Pointer(0, device, None, None)
        stream = self._streams[device]
        block, holder = self.memory.allocate(nbytes, device, stream, self.inside)
        return Pointer(block.address, device, holder, block)

    def queued(self, what: str, arrays: Sequence[Any], launch: Launch | None = None) -> None:
        """Record an operation that CuPy queues on its current stream of the current device."""
        device = self._current
        blocks = tuple(a.data.block for a in arrays if a.data.block is not None)
        for block in blocks:
            assert block.alive, f"{what} of memory that was given back"
            assert block.device == device, f"{what} of device {block.device} on device {device}"
        self.queue.append(Queued(what, device, self._streams[device], blocks, launch))

    def element_kernel(
        self, written: Sequence[Any], read: Sequence[Any], run: Callable[[], None]
    ) -> None:
        """Queue an elementwise kernel of CuPy's, which takes only aligned elements.

        ``run`` holds no array, because a graph does not keep memory alive.
        """
        for array in (*written, *read):
            assert array.is_aligned(), "a kernel of CuPy's on elements that are not aligned"
        self.queued("a kernel of CuPy's", [*written, *read])
        blocks = {a.data.block for a in (*written, *read)} - {None}
        lives = {block: block.life for block in blocks}

        def step() -> None:
            for block, life in lives.items():
                assert block.alive, "a graph copies memory that was given back"
                assert block.life == life, "a graph copies what is somebody else's now"
            run()

        self._run_or_capture(self._streams[self._current], step)

    # Kernels.

    def compiled(self, configs: Sequence[KernelConfig], device: int) -> list[Any]:
        """Stands for compile_kernels."""
        from cuflash.cuda.compile import CompiledKernel

        before = len(self._kernels)
        self._kernels += [(config, self.make(config)) for config in configs]
        every = range(before, len(self._kernels))
        return [CompiledKernel(self._kernels[i][1], i + 1, 32, 0) for i in every]

    def launch(self, handle: int, *numbers: int) -> None:
        """Stands for cuLaunchKernel."""
        config, kernel = self._kernels[handle - 1]
        grid, *shape, stream, parameters, extra = numbers
        assert shape == [1, 1, config.threads, 1, 1, config.shared_bytes]
        assert (grid > 0, extra) == (True, 0)
        assert (threading.get_ident(), self._current) in self.contexts, "a thread has no context"
        dtype = struct_of(config).dtype
        (place,) = (ctypes.c_void_p * 1).from_address(parameters)
        device, replayed = self._current, stream in self.capturing
        lives = {block: block.life for block in self.memory.living()}
        held = np.frombuffer(ctypes.string_at(place, dtype.itemsize), np.uint64).copy()

        def run() -> None:
            launch = Launch(config, held.view(dtype)[0], grid, device, stream, replayed, lives)
            self.audit(launch)
            first = ctypes.c_void_p(held.ctypes.data)
            kernel(grid, config.threads, config.shared_bytes, ctypes.addressof(first))
            self.memory.check()

        self._run_or_capture(stream, run)

    def memset(self, address: int, value: int, nbytes: int, stream: int) -> None:
        """Stands for cudaMemsetAsync."""
        block = self.memory.at(address)
        assert block is not None
        assert block.holds(address, nbytes)
        life = block.life

        def run() -> None:
            assert (block.alive, block.life) == (True, life), "memset of memory given back"
            start = address - block.address
            block.bytes[start : start + nbytes] = value
            self.queue.append(Queued("memset", block.device, stream, (block,)))

        self._run_or_capture(stream, run)

    def _run_or_capture(self, stream: int, run: Callable[[], None]) -> None:
        steps = self.capturing.get(stream)
        if steps is None:
            run()
        else:
            steps.append(run)

    @contextlib.contextmanager
    def capture(self, stream: int) -> Iterator[list[Callable[[], None]]]:
        """Launches on a stream within this context run when the returned steps are called."""
        steps: list[Callable[[], None]] = []
        self.capturing[stream] = steps
        try:
            yield steps
        finally:
            del self.capturing[stream]

"""Addresses of the CUDA driver's functions, its contexts, and counters of tiles."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from .layout import Driver

__all__ = ["context_of", "driver_functions", "new_counter"]

_NAMES = {
    Driver.launch: "cuLaunchKernelEx",
    Driver.encode: "cuTensorMapEncodeTiled",
    Driver.memset: "cuMemsetD32Async",
    Driver.is_capturing: "cuStreamIsCapturing",
    Driver.stream_context: "cuStreamGetCtx",
    Driver.current_context: "cuCtxGetCurrent",
    Driver.push_context: "cuCtxPushCurrent_v2",
    Driver.pop_context: "cuCtxPopCurrent_v2",
}


@functools.cache
def _library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def driver_functions() -> tuple[int, ...]:
    """Return the address of each function, in the order of :class:`~.layout.Driver`.

    Raises
    ------
    OSError, AttributeError
        If the driver is missing or too old.
    """
    functions = (getattr(_library(), _NAMES[one]) for one in Driver)
    return tuple(ctypes.cast(one, ctypes.c_void_p).value or 0 for one in functions)


def context_of(device: int) -> int:
    """Return the address of the context that CUDA's runtime, CuPy and XLA share on a device."""
    import cupy

    found = ctypes.c_void_p()
    with cupy.cuda.Device(device):
        cupy.cuda.runtime.free(0)  # makes the context, if there is none
        status = _library().cuCtxGetCurrent(ctypes.byref(found))
    if status or not found.value:
        raise OSError(f"device {device} has no context: CUDA error {status}")
    return found.value


def new_counter(device: int) -> Any:
    """Return a counter of tiles that is 0, whichever stream uses it first."""
    import cupy

    with cupy.cuda.Device(device):
        counter = cupy.zeros(1, cupy.int32)
        cupy.cuda.get_current_stream().synchronize()
    return counter

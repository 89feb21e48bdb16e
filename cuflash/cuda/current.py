"""The current device of the calling thread, CuPy's stream there, and its capture status."""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

__all__ = ["PER_THREAD", "current_stream", "is_capturing", "is_current"]

#: Whoever asks has imported CuPy. An import statement would look for its module much longer.
_modules: dict[str, Any] = sys.modules

#: CuPy's address of the per-thread default stream, which is another stream in every thread.
PER_THREAD = 2


class _Thread(threading.local):
    """Devices whose context this thread has had."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_thread = _Thread()


def is_current(device_id: int) -> bool:
    """Whether a device is the thread's current one, so that the thread can launch on it.

    The driver launches only in a context, and a thread that has not called CUDA has none. The first
    call with the thread's device therefore makes its context current (CUDA Runtime API:
    ``cudaSetDevice``).
    """
    runtime = _modules["cupy"].cuda.runtime
    if runtime.getDevice() != device_id:
        return False
    if device_id not in _thread.devices:
        runtime.setDevice(device_id)
        _thread.devices.add(device_id)
    return True


def current_stream(device_id: int) -> int:
    """Address of CuPy's current stream on a device, which need not be the current device."""
    cupy = _modules["cupy"]
    return cupy.cuda.get_current_stream(device_id).ptr or _default_stream()


@functools.cache
def _default_stream() -> int:
    """The default stream on which CuPy runs; a CuPy variable may choose the per-thread one."""
    from cupy_backends.cuda import stream

    return PER_THREAD if stream.get_default_stream_ptr() == PER_THREAD else 0


def is_capturing(stream: int) -> bool:
    """Whether a stream is capturing: launches on it then run when the graph does."""
    return stream != 0 and bool(_modules["cupy"].cuda.runtime.streamIsCapturing(stream))

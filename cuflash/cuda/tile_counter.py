"""Counters from which persistent kernels draw their tiles.

A counter is 0 before and after a launch. Launches in sequence share one; concurrent launches must
not.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from .current import PER_THREAD, current_stream, is_capturing

__all__ = ["counter_of_launch"]

#: Addresses, and the arrays that own them. It never shrinks, because a counter may be in use for as
#: long as its stream has work. Every thread that has launched on its per-thread stream therefore
#: leaves one counter behind, 512 bytes of CuPy's pool.
_counters: dict[tuple[int, int, object], tuple[int, Any]] = {}
_lock = threading.Lock()


class _Thread(threading.local):
    """A token of the thread. Its identifier would not do: a later thread may get the same one."""

    def __init__(self) -> None:
        self.token = object()


_thread = _Thread()


def counter_of_launch(device_id: int, stream: int, workspace: int) -> int:
    """Address of a counter that is 0 and unused when the next launch of a stream runs.

    Each stream has its own counter, and each thread has one for its per-thread default stream:
    launches that share a counter run in sequence. During a capture the counter is in the workspace
    and the graph itself sets it to 0, because graphs captured from one stream may run concurrently.

    Parameters
    ----------
    device_id
        The current device.
    stream
        A stream of that device.
    workspace
        Address for the counter of a captured launch; 0 if the caller knows that there is no
        capture.
    """
    if workspace and is_capturing(stream):
        import cupy

        cupy.cuda.runtime.memsetAsync(workspace, 0, 4, stream)
        return workspace
    owner = _thread.token if stream == PER_THREAD else None
    key = (device_id, stream, owner)
    found = _counters.get(key)
    if found is None:
        with _lock:
            found = _counters.get(key)
            if found is None:
                found = _counters[key] = _new_counter(device_id, stream)
    return found[0]


def _new_counter(device_id: int, stream: int) -> tuple[int, Any]:
    """A counter that is zeroed in the order of the stream, and its address."""
    import cupy

    current = current_stream(device_id) == stream
    other = contextlib.nullcontext() if current else cupy.cuda.ExternalStream(stream, device_id)
    with other:
        counter = cupy.zeros(1, cupy.int32)
    return int(counter.data.ptr), counter

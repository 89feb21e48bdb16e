"""Counters from which persistent kernels draw their tiles.

A counter is 0 before a launch and 0 again after it, so launches one after the
other share one; two at once must not.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from .current import PER_THREAD, current_stream, is_capturing

__all__ = ["counter_of_launch"]

#: Addresses, and what keeps them. Never shrinks: a counter may be in use for as long as its stream
#: has work. So every thread that has launched on its per-thread stream leaves one behind, 512 bytes
#: of CuPy's pool.
_counters: dict[tuple[int, int, object], tuple[int, Any]] = {}
_lock = threading.Lock()


class _Thread(threading.local):
    """Something of the thread's own. Its identifier would be given to another one later."""

    def __init__(self) -> None:
        self.token = object()


_thread = _Thread()


def counter_of_launch(device_id: int, stream: int, workspace: int) -> int:
    """Address of a counter, 0 and unused when the next launch of a stream runs.

    Of the stream, and for the per-thread default stream of the thread too: what
    shares it runs one after the other. While a graph is being captured the
    counter is in the workspace, set to 0 by the graph itself: graphs captured
    from one stream may run at once.

    Parameters
    ----------
    device_id
        The current device.
    stream
        Of that device.
    workspace
        Address for the counter of a captured launch; 0 if the caller knows that
        it is not captured.
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
    """A zero that is made in the order of the stream, and its address before it."""
    import cupy

    current = current_stream(device_id) == stream
    other = contextlib.nullcontext() if current else cupy.cuda.ExternalStream(stream, device_id)
    with other:
        counter = cupy.zeros(1, cupy.int32)
    return int(counter.data.ptr), counter

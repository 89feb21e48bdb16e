"""Launches a kernel that may begin while the previous kernel of the stream still runs.

CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization". Such a
kernel contains an instruction that waits for what it reads.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from ..bounded_cache import BoundedCache
from .prepared_kernel import Launch, Overlapping

__all__ = ["overlapping_launch"]

#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
_OVERLAPS = 6
#: The number of sizes and streams whose configurations are kept.
_KEPT = 256

_Numbers = ctypes.c_uint * 3


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: a union of 64 bytes holds the value."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *(("grid", _Numbers), ("block", _Numbers), ("shared_bytes", ctypes.c_uint)),
        *(("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint)),
    )


#: The one attribute, which lives as long as the process.
_ATTRIBUTE = _Attribute(_OVERLAPS, 0, (1,))
_ATTRIBUTE_ADDRESS = ctypes.addressof(_ATTRIBUTE)


@functools.cache
def overlapping_launch() -> Overlapping | None:
    """Return a function that makes such launches; None without a driver that has them.

    A launch has all its arguments and returns CUDA's error.
    """
    try:
        function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError):
        return None

    # Making a configuration takes longer than the rest of a launch.
    kept: BoundedCache[tuple[tuple[int, ...], int], Any] = BoundedCache(_KEPT)

    def launch(handle: int, shape: tuple[int, ...], stream: int, parameters: int) -> Launch:
        config = kept.get((shape, stream))
        if config is None:
            config = _Config(shape[:3], shape[3:6], shape[6], stream, _ATTRIBUTE_ADDRESS, 1)
            kept[shape, stream] = config
        # References keep what they refer to, and a call takes them quicker than numbers.
        where = ctypes.c_void_p(handle), ctypes.c_void_p(parameters)
        return functools.partial(function, ctypes.byref(config), *where, None)

    return launch

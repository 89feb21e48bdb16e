"""Launches a kernel that may begin while the previous kernel of the stream still runs.

CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization". Such a
kernel contains an instruction that waits for what it reads.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from ..bounded_cache import BoundedCache

__all__ = ["overlapping_launch"]

#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
_OVERLAPS = 6
#: The number of sizes and streams whose launches are kept.
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


@functools.cache
def overlapping_launch() -> Callable[[int, tuple[int, ...], int, int], int] | None:
    """Return a function that launches a kernel and returns CUDA's error; None without a driver.

    The function takes the kernel, its grid, block and bytes of shared memory, the stream,
    and the address of the addresses of the parameters.
    """
    try:
        function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p] * 4
    attribute = _Attribute(_OVERLAPS)
    attribute.value[0] = 1
    attributes = ctypes.addressof(attribute)
    # A configuration and its address: making one takes longer than to call the function.
    kept: BoundedCache[tuple[tuple[int, ...], int], tuple[_Config, int]] = BoundedCache(_KEPT)

    def launch(handle: int, shape: tuple[int, ...], stream: int, parameters: int) -> int:
        found = kept.get((shape, stream))
        if found is None:
            config = _Config(shape[:3], shape[3:6], shape[6], stream, attributes, 1)
            kept[shape, stream] = found = config, ctypes.addressof(config)
        return int(function(found[1], handle, parameters, None))

    launch.__dict__["attribute"] = attribute  # it lives as long as the function
    return launch

"""The limits of a CUDA device or a CPU, which plans are made for."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

from ..config import Environment
from .cores import usable_cores

__all__ = ["DeviceLimits", "HostLimits"]


@dataclass(frozen=True)
class DeviceLimits:
    """The limits of a CUDA device; bytes unless said otherwise."""

    compute_capability: tuple[int, int]
    shared_per_block: int  # with the opt-in
    shared_per_sm: int
    registers_per_block: int  # 32-bit registers
    num_sms: int
    l2: int
    nvrtc: tuple[int, int] = (13, 0)  # version of the installed compiler; (0, 0): none
    name: str = ""  # for messages; no decision depends on it

    @property
    def architecture(self) -> str:
        """The compiler's name of the device's own instruction set."""
        return "sm_{}{}".format(*self.compute_capability)

    @classmethod
    def query(cls, device_id: int) -> DeviceLimits:
        """Ask the driver. The answer is kept for the life of the process."""
        return _query_device(device_id)


@functools.cache
def _query_device(device_id: int) -> DeviceLimits:
    import cupy

    device = cupy.cuda.Device(device_id)
    attributes = device.attributes
    capability = device.compute_capability  # "90", "120"
    properties = cupy.cuda.runtime.getDeviceProperties(device_id)
    name = properties["name"]
    return DeviceLimits(
        compute_capability=(int(capability[:-1]), int(capability[-1])),
        shared_per_block=attributes["MaxSharedMemoryPerBlockOptin"],
        shared_per_sm=attributes["MaxSharedMemoryPerMultiprocessor"],
        registers_per_block=attributes["MaxRegistersPerBlock"],
        num_sms=attributes["MultiProcessorCount"],
        l2=attributes["L2CacheSize"],
        nvrtc=_nvrtc_version(),
        name=name.decode() if isinstance(name, bytes) else str(name),
    )


def _nvrtc_version() -> tuple[int, int]:
    try:
        from cupy.cuda import nvrtc

        major, minor = nvrtc.getVersion()
    except Exception:  # of several types; code that needs the compiler says what is missing
        return (0, 0)
    return int(major), int(minor)


@dataclass(frozen=True)
class HostLimits:
    """The cache that sets the block sizes of the tiled NumPy code, and the threads it may use."""

    cache: int  # bytes of cache for one thread
    threads: int = 1  # number that compute at once; results do not depend on it

    @classmethod
    def query(cls) -> HostLimits:
        """The second-level cache of one core, or ``CUFLASH_CPU_CACHE``; the usable cores."""
        return cls(Environment.read().cpu_cache or _second_level_cache(), usable_cores())


@functools.cache
def _second_level_cache() -> int:
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            if (index / "level").read_text().strip() == "2":
                return _bytes_of((index / "size").read_text().strip())
        except (OSError, ValueError):
            continue
    name = "SC_LEVEL2_CACHE_SIZE"
    if name in getattr(os, "sysconf_names", {}):
        size = os.sysconf(name)
        if size > 0:
            return size
    return 1 << 20  # a common size, if neither source of Linux gives one


def _bytes_of(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1:] in units else int(text)

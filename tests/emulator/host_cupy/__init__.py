"""A CuPy whose device is the host: the public functions run in the emulator as users call them."""

from __future__ import annotations

from .device import HostCupy, host_cupy

__all__ = ["HostCupy", "host_cupy"]

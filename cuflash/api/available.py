"""Whether the calls can use CUDA."""

from __future__ import annotations

from ..cuda.available import is_usable

__all__ = ["is_available"]


def is_available() -> bool:
    """Return whether CUDA can be used: CuPy, not a ROCm build, with a driver and a device."""
    return is_usable()

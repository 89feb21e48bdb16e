"""Whether CUDA can be used in this process, and if not, why."""

from __future__ import annotations

import functools

from ..errors import BackendUnavailableError

__all__ = ["device_count", "is_usable", "require_device"]


@functools.cache
def _why_not() -> str | None:
    """The reason why there is no usable device; None if there is one."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy is not installed ({error}): pip install 'cuflash[cuda13]'"
    except OSError as error:  # it makes the folder of its kernel cache
        return f"CuPy could not be imported ({error}): is CUPY_CACHE_DIR one that can be written?"
    if cupy.cuda.runtime.is_hip:
        return "this CuPy is a ROCm build; cuflash's kernels are CUDA"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"the CUDA driver has no usable device ({error})"
    return None if count else "there is no CUDA device"


def is_usable() -> bool:
    """Whether there is a CUDA device that CuPy can use."""
    return _why_not() is None


def require_device() -> int:
    """The current CUDA device.

    Raises
    ------
    BackendUnavailableError
        If there is none, with the reason.
    """
    reason = _why_not()
    if reason is not None:
        raise BackendUnavailableError(f'backend="cuda" cannot be used: {reason}')
    import cupy

    return int(cupy.cuda.runtime.getDevice())


def device_count() -> int:
    """How many CUDA devices there are; call it only where one is usable."""
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())

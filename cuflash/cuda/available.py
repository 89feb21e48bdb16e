"""Whether CUDA is usable in this process, and if not, why."""

from __future__ import annotations

import functools
from typing import Any

from ..errors import BackendUnavailableError, install

__all__ = ["device_count", "is_usable", "require_cupy", "require_device"]


@functools.cache
def _why_not() -> str | None:
    """The reason why no device is usable; None if one is.

    Without a device NumPy arrays are computed on the host, so any exception of CuPy here is a
    reason and not an error.
    """
    try:
        import cupy
    except ModuleNotFoundError as error:
        if error.name == "cupy":
            return f"CuPy is not installed ({error}): {install('cuda13')}"
        return _not_imported(error)
    except Exception as error:
        return _not_imported(error)
    try:
        if cupy.cuda.runtime.is_hip:
            return "this CuPy is a ROCm build; cuflash's kernels are CUDA"
        refused = cupy.cuda.runtime.CUDARuntimeError
    except Exception as error:
        return f"the CuPy in {_folder(cupy)} is incomplete ({_said(error)}): install it again"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except refused as error:
        return f"the CUDA driver has no usable device ({error})"
    except Exception as error:
        return f"CuPy could not ask for devices ({_said(error)})"
    return None if count else "there is no CUDA device"


def _not_imported(error: Exception) -> str:
    reason = f"CuPy could not be imported ({_said(error)})"
    if isinstance(error, OSError):  # the import creates the folder of its kernel cache
        return f"{reason}: is CUPY_CACHE_DIR one that can be written?"
    return f'{reason}: python -c "import cupy" shows where'


def _said(error: Exception) -> str:
    """An exception in one line; CuPy frames some messages with lines of "="."""
    words = (word for word in str(error).split() if word.strip("="))
    return f"{type(error).__name__}: {' '.join(words)}"


def _folder(module: Any) -> str:
    return ", ".join(getattr(module, "__path__", ())) or "this process"


def is_usable() -> bool:
    """Whether there is a CUDA device that CuPy can use."""
    return _why_not() is None


def require_cupy(what: str) -> Any:
    """The module ``cupy``, if there is a CUDA device that it can use.

    Parameters
    ----------
    what
        The feature that needs it, for the error.

    Raises
    ------
    BackendUnavailableError
        If there is none; the message has the reason.
    """
    reason = _why_not()
    if reason is not None:
        raise BackendUnavailableError(f"{what} cannot be used: {reason}")
    import cupy

    return cupy


def require_device() -> int:
    """The current CUDA device.

    Raises
    ------
    BackendUnavailableError
        If there is none; the message has the reason.
    """
    return int(require_cupy('backend="cuda"').cuda.runtime.getDevice())


def device_count() -> int:
    """The number of CUDA devices; call it only where one is usable."""
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())

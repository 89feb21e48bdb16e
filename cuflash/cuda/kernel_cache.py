"""CuPy's kernel cache on disk: its folder, whether it stores kernels, and its content."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from ..errors import ArgumentValueError

__all__ = ["binaries", "kernel_cache_folder", "require_kernel_cache"]


def kernel_cache_folder() -> Path:
    """The folder in which CuPy keeps compiled kernels."""
    return Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")


def require_kernel_cache() -> Path:
    """The folder of the kernel cache, if kernels can be kept there.

    Raises
    ------
    ArgumentValueError
        If CuPy is set to keep nothing on disk, or the folder is not writable.
    """
    if os.environ.get("CUPY_CACHE_IN_MEMORY") == "1":
        raise ArgumentValueError(
            "CUPY_CACHE_IN_MEMORY", "1", "0 or unset: it keeps nothing on disk"
        )
    folder = kernel_cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # CuPy writes the same way
            return folder
    except OSError as error:
        raise ArgumentValueError(
            "CUPY_CACHE_DIR", f"{folder} ({error})", "a folder that can be written"
        ) from error


def binaries(folder: Path) -> dict[str, int]:
    """The write time of every binary, by name.

    CuPy replaces whole files, so a binary with the same time has not been compiled again.
    """
    found = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # the file may be deleted meanwhile
                if entry.name.endswith(".cubin"):
                    found[entry.name] = entry.stat().st_mtime_ns
    return found

"""CuPy's kernel cache on disk: where it is, whether it takes kernels, what it holds."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from ..errors import ArgumentValueError

__all__ = ["binaries", "kernel_cache_folder", "require_kernel_cache"]


def kernel_cache_folder() -> Path:
    """The folder that CuPy keeps compiled kernels in."""
    return Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")


def require_kernel_cache() -> Path:
    """The folder of the kernel cache, where kernels can be kept.

    Raises
    ------
    ArgumentValueError
        If CuPy is told to keep nothing on disk, or the folder cannot be written.
    """
    if os.environ.get("CUPY_CACHE_IN_MEMORY") == "1":
        raise ArgumentValueError(
            "CUPY_CACHE_IN_MEMORY", "1", "0 or unset: it keeps nothing on disk"
        )
    folder = kernel_cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # permissions do not tell; CuPy does the same
            return folder
    except OSError as error:
        raise ArgumentValueError(
            "CUPY_CACHE_DIR", f"{folder} ({error})", "a folder that can be written"
        ) from error


def binaries(folder: Path) -> dict[str, int]:
    """Time of writing of every binary by its name.

    CuPy puts a whole file in the place of another, so what has the same time
    has not been compiled again.
    """
    found = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # somebody tidies up
                if entry.name.endswith(".cubin"):
                    found[entry.name] = entry.stat().st_mtime_ns
    return found

"""Registers the handler with XLA, or warns why it cannot."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import threading
import warnings
from typing import Any

import jax
import numpy as np

from ...config import Environment
from .registry import Registry
from .stamp import STAMP

__all__ = ["TARGET", "is_ready", "tables", "tell"]

#: The name under which computations call the handler.
TARGET = "cuflash_launch_table"

#: The tables of this process.
tables = Registry()

#: XLA's names of the platforms.
_PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}

_lock = threading.Lock()


def is_ready(platform: str) -> bool:
    """Return whether computations for a platform may call the handler.

    If Numba is missing, or the environment says so, XLA calls Python instead. If the
    handler cannot be compiled or registered, XLA calls Python too, after one warning.
    """
    if not Environment.read().jax_native or importlib.util.find_spec("numba") is None:
        return False
    with _lock:  # two threads would each compile a handler, and XLA accepts only one
        return _registered(platform)


@functools.cache
def _registered(platform: str) -> bool:
    try:
        handler = _handler()
        capsule = jax.ffi.pycapsule(handler.ctypes)
        jax.ffi.register_ffi_target(TARGET, capsule, platform=_PLATFORMS[platform])
    except Exception as error:  # of Numba's compiler, or of XLA
        warnings.warn(
            f"cuflash.jax calls Python for every pass, which is slower: {error}", stacklevel=2
        )
        return False
    return True


@functools.cache
def _handler() -> Any:
    """Return the handler, compiled or from Numba's cache, with the address of the tables."""
    from numba import cfunc, types

    from .handler import handle

    kind = types.int64(types.int64)
    with contextlib.suppress(Exception):  # the cache has no folder, or a broken file
        made = cfunc(kind, cache=True)(handle)
        if _greet(made, tables) == STAMP:  # else it was compiled from other sources
            return made
    made = cfunc(kind)(handle)
    if _greet(made, tables) != STAMP:
        raise RuntimeError("the compiled handler is not the one of these sources")
    return made


def _greet(handler: Any, registry: Registry) -> int:
    """Give the handler the address of the tables, and return its stamp."""
    frame = np.array([0, registry.address], np.int64)
    return int(handler.ctypes(frame.ctypes.data))


def tell(registry: Registry) -> None:
    """Make the handler look for tables in ``registry`` from now on."""
    _greet(_handler(), registry)

"""Makes XLA know the handler, or says why it cannot."""

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

#: What computations call the handler by.
TARGET = "cuflash_launch_table"

#: The tables of this process.
tables = Registry()

#: XLA's names of the platforms.
_PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}

_lock = threading.Lock()


def is_ready(platform: str) -> bool:
    """Whether computations for a platform may call the handler.

    Where Numba is missing, or the environment says so, Python is called
    instead; where XLA is unlike what is known here, with one warning.
    """
    if not Environment.read().jax_native or importlib.util.find_spec("numba") is None:
        return False
    with _lock:  # two threads would compile a handler each, and XLA takes one
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
    """The handler, compiled or from Numba's cache, which has been told where the tables are."""
    from numba import cfunc, types

    from .handler import handle

    kind = types.int64(types.int64)
    with contextlib.suppress(Exception):  # no folder to keep it in, or what is there is broken
        made = cfunc(kind, cache=True)(handle)
        if _greet(made, tables) == STAMP:  # else kept from other sources
            return made
    made = cfunc(kind)(handle)
    if _greet(made, tables) != STAMP:
        raise RuntimeError("the compiled handler is not the one of these sources")
    return made


def _greet(handler: Any, registry: Registry) -> int:
    """Bring the handler the address of the tables; the stamp that it answers with."""
    frame = np.array([0, registry.address], np.int64)
    return int(handler.ctypes(frame.ctypes.data))


def tell(registry: Registry) -> None:
    """Let the handler look for tables there from now on."""
    _greet(_handler(), registry)

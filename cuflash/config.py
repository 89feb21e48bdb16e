"""The environment variables, all in one place.

``CUFLASH_BACKEND`` and ``CUFLASH_CPU_CACHE`` take effect at the next call, and
``CUFLASH_JAX_NATIVE`` for computations compiled from then on. ``CUFLASH_CUDA_SRC``,
``CUFLASH_JITTER`` and edits of the sources take effect for calls of a new signature (shapes,
dtypes, strides, keywords) and in a new process: a signature that has run keeps its kernels.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from .errors import ArgumentValueError

__all__ = ["VARIABLES", "Environment"]

#: The environment variable of each field of :class:`Environment`, and its meaning.
VARIABLES = {
    "backend": ("CUFLASH_BACKEND", 'what `backend="auto"` means: `auto`, `cuda` or `numpy`'),
    "cuda_src": ("CUFLASH_CUDA_SRC", "folder of the CUDA sources, instead of the installed ones"),
    "cpu_cache": (
        "CUFLASH_CPU_CACHE",
        "bytes of cache that one thread may count on, instead of what the CPU reports",
    ),
    "jitter": (
        "CUFLASH_JITTER",
        "1: pipelined kernels wait a random time at every barrier; for tests of the pipeline",
    ),
    "jax_native": (
        "CUFLASH_JAX_NATIVE",
        "0: computations of JAX on CUDA call Python for every pass, even where Numba is installed",
    ),
}


@dataclass(frozen=True)
class Environment:
    """The settings of the environment at the time of the call."""

    backend: str = "auto"
    cuda_src: str | None = None
    cpu_cache: int | None = None
    jitter: bool = False
    jax_native: bool = True

    @classmethod
    def read(cls) -> Environment:
        """Read the variables; an empty one counts as unset.

        Raises
        ------
        ArgumentValueError
            If the value of a variable is not allowed.
        """
        values = {f.name: os.environ.get(VARIABLES[f.name][0]) or None for f in fields(cls)}
        backend = (values["backend"] or "auto").lower()
        if backend not in ("auto", "cuda", "numpy"):
            raise ArgumentValueError(
                VARIABLES["backend"][0], repr(values["backend"]), "auto, cuda or numpy"
            )
        cpu_cache = values["cpu_cache"]
        if cpu_cache is not None and not (cpu_cache.isdecimal() and int(cpu_cache) > 0):
            raise ArgumentValueError(
                VARIABLES["cpu_cache"][0], repr(cpu_cache), "a positive number of bytes"
            )
        jitter, native = (_flag(values, *one) for one in (("jitter", "0"), ("jax_native", "1")))
        cache = int(cpu_cache) if cpu_cache else None
        return cls(backend, values["cuda_src"], cache, jitter, native)


def _flag(values: Mapping[str, str | None], name: str, default: str) -> bool:
    """Whether a variable that may be 0 or 1 is 1."""
    value = values[name] or default
    if value not in ("0", "1"):
        raise ArgumentValueError(VARIABLES[name][0], repr(value), "0 or 1")
    return value == "1"

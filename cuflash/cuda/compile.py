"""Compiles the kernel of a configuration, once for a process and device."""

from __future__ import annotations

import functools
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CompileError, ToolchainError
from ..planning.kernel import KernelConfig
from .source import find_sources, source_digest, translation_unit

__all__ = ["CompiledKernel", "compile_kernel", "compile_options", "require_toolchain"]

_REMEDY = "install NVRTC and the CUDA headers with: pip install 'cuflash[cuda13]' (or [cuda12])"


@dataclass(frozen=True)
class CompiledKernel:
    """A loaded kernel and what the compiler made of it."""

    function: Any  # cupy.RawKernel
    registers: int
    local_bytes: int  # of local memory for a thread: spills and arrays


class _Once:
    """Values made once for each key, even when many threads ask first at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[Any, threading.Lock] = {}
        self._values: dict[Any, CompiledKernel] = {}

    def get(self, key: Any, make: Any) -> CompiledKernel:
        value = self._values.get(key)
        if value is not None:
            return value
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:  # an exception leaves no value, so the next thread tries again
            if key not in self._values:
                self._values[key] = make()
            return self._values[key]

    def __len__(self) -> int:
        return len(self._values)


_kernels = _Once()


def compile_kernel(config: KernelConfig, device_id: int) -> CompiledKernel:
    """The kernel of ``config`` on a device, compiled or from a cache.

    It is kept for the life of the process; CuPy keeps the binary on disk. An
    edited source file is noticed by its digest.

    Raises
    ------
    ToolchainError
        If NVRTC, the CUDA headers or the CUDA sources are missing.
    CompileError
        If NVRTC refuses the source.
    """
    root = find_sources()
    digest = source_digest(root, config.generation, config.kernel)
    return _kernels.get(
        (config, str(root), digest, device_id), functools.partial(_build, config, root, device_id)
    )


def compile_options(config: KernelConfig, root: Path) -> tuple[str, ...]:
    """Options of ours; CuPy adds its include folders and the device's own architecture."""
    options: tuple[str, ...] = (f"-I{root}",)
    if not config.architecture[-1].isdigit():  # "sm_90a": the last -arch wins since NVRTC 12.9
        options += (f"-arch={config.architecture}",)
    return options


def _build(config: KernelConfig, root: Path, device_id: int) -> CompiledKernel:
    require_toolchain()
    import cupy

    text = translation_unit(config, root)
    try:
        with cupy.cuda.Device(device_id):
            module = cupy.RawModule(code=text, options=compile_options(config, root))
            function = module.get_function(config.entry)
            if config.shared_bytes > 48 * 1024:
                function.max_dynamic_shared_size_bytes = config.shared_bytes
            return CompiledKernel(function, function.num_regs, function.local_size_bytes)
    except cupy.cuda.compiler.CompileException as error:
        raise _compile_error(config, str(error)) from error


def _compile_error(config: KernelConfig, log: str) -> CompileError | ToolchainError:
    missing = re.search(r"(?:cannot|could not) open source file \"((?:cuda_|vector_)\w+\.h)\"", log)
    if missing:
        return ToolchainError(
            f"the CUDA header {missing[1]} was not found; looked in: "
            f"{', '.join(_include_folders())}; {_REMEDY}"
        )
    return CompileError(f"NVRTC refused {config.entry} ({config}):\n{log}")


def _include_folders() -> list[str]:
    from cupy._core import core

    options = core.assemble_cupy_compiler_options(())
    return [option[2:] for option in options if option.startswith("-I")]


@functools.cache
def require_toolchain() -> None:
    """Raise unless NVRTC can be loaded.

    Raises
    ------
    ToolchainError
        Naming what was looked for and the remedy.
    """
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except Exception as error:  # of several types, by CuPy version and platform
        raise ToolchainError(f"NVRTC could not be loaded ({error}); {_REMEDY}") from error

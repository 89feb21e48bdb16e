"""Compiles the kernel of a configuration, once for each process and device."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import site
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import Environment
from ..errors import CompileError, ToolchainError, install
from ..planning.kernel import KernelConfig
from .source import Sources, find_sources, translation_unit

__all__ = [
    "CompiledKernel",
    "compile_kernel",
    "compile_kernels",
    "compile_options",
    "require_toolchain",
]

_REMEDY = f"install NVRTC and the CUDA headers with: {install('cuda13')} (or cuda12)"
_NO_CACHE = (
    "CuPy's kernel cache cannot be used, so every process compiles this kernel again; set "
    "CUPY_CACHE_DIR to a folder that can be read and written"
)
_IN_MEMORY = "CUPY_CACHE_IN_MEMORY"
_environment = threading.Lock()

#: Attempts to compile a plan whose sources are being edited.
_TRIES = 4
#: Seconds before another look for a missing file.
_PAUSE = 0.02


@dataclass(frozen=True)
class CompiledKernel:
    """A loaded kernel, with the compiler's numbers."""

    function: Any  # cupy.RawKernel; it keeps the code loaded
    handle: int  # the driver's, for the device for which it was compiled
    registers: int
    local_bytes: int  # local memory of a thread in bytes: spills and arrays


class _Once:
    """Values that are made once for each key, even if many threads ask at the same time."""

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
        with lock:  # an exception stores no value, so the next thread tries again
            if key not in self._values:
                self._values[key] = make()
            return self._values[key]

    def __len__(self) -> int:
        return len(self._values)


_kernels = _Once()


class _SourcesChangedError(CompileError):
    """The compiled text may be neither the old sources nor the new ones."""


class _SourceGoneError(ToolchainError):
    """A source file is missing, for good or while an editor rewrites it."""


def compile_kernel(config: KernelConfig, device_id: int) -> CompiledKernel:
    """One kernel, as from :func:`compile_kernels`."""
    return compile_kernels((config,), device_id)[0]


def compile_kernels(configs: Sequence[KernelConfig], device_id: int) -> list[CompiledKernel]:
    """The kernels of a plan on a device, compiled or from a cache.

    The process keeps them for its life; CuPy keeps the binaries on disk. This function notices an
    edited source file by its digest. It is called once for each new signature, so a signature that
    has run in this process keeps its kernels; a new signature, or a new process, uses the edit.

    All kernels come from the same sources: if an edit happens during compilation, all of them are
    compiled again, and nothing compiled during the edit is kept.

    Parameters
    ----------
    configs, device_id
        The kernels to compile, and the device that will run them.

    Raises
    ------
    ToolchainError
        If NVRTC, the CUDA headers or the CUDA sources are missing and there is a kernel to compile.
    CompileError
        If NVRTC refuses the source, the driver refuses the binary, or the sources changed during
        every attempt.
    """
    if not configs:
        return []
    for _ in range(_TRIES - 1):
        try:
            return _compile_all(configs, device_id)
        except _SourcesChangedError:
            continue
        except _SourceGoneError:
            time.sleep(_PAUSE)
    return _compile_all(configs, device_id)


def _compile_all(configs: Sequence[KernelConfig], device_id: int) -> list[CompiledKernel]:
    sources, jitter = Sources(find_sources()), Environment.read().jitter
    try:
        for config in configs:  # reads every file before it compiles anything
            sources.digest_of(config)
    except (OSError, UnicodeDecodeError) as error:
        raise _SourceGoneError(
            f"the CUDA sources in {sources.root} cannot be read: {error}"
        ) from error
    return [_compile(config, sources, device_id, jitter) for config in configs]


def _compile(
    config: KernelConfig, sources: Sources, device_id: int, jitter: bool
) -> CompiledKernel:
    digest = sources.digest_of(config)
    return _kernels.get(
        (config, str(sources.root), digest, device_id, jitter),
        functools.partial(_build, config, sources, device_id, jitter),
    )


def compile_options(config: KernelConfig, root: Path) -> tuple[str, ...]:
    """The package's own options; CuPy adds its include folders and the device's architecture."""
    options: tuple[str, ...] = (f"-I{root}",)
    if not config.architecture[-1].isdigit():  # "sm_90a" beside CuPy's sm_90: NVRTC 12.9 and later
        options += (f"-arch={config.architecture}",)
    return options


def _build(config: KernelConfig, sources: Sources, device_id: int, jitter: bool) -> CompiledKernel:
    require_toolchain()
    import cupy

    digest = sources.digest_of(config)
    text = translation_unit(config, sources.root, jitter, digest)
    unchanged = functools.partial(_require_unchanged, config, sources)
    try:
        with cupy.cuda.Device(device_id):
            try:
                return _load(config, text, sources.root, unchanged)
            except OSError as error:  # CuPy reads and writes cache files; CUDA has other errors
                warnings.warn(f"{error}: {_NO_CACHE}", RuntimeWarning, stacklevel=2)
            with _nothing_on_disk():
                return _load(config, text, sources.root, unchanged)
    except cupy.cuda.compiler.CompileException as error:
        unchanged()
        raise _compile_error(config, str(error)) from error
    except cupy.cuda.driver.CUDADriverError as error:
        raise CompileError(f"the driver refused {config.entry} ({config}): {error}") from error


def _require_unchanged(config: KernelConfig, sources: Sources) -> None:
    if sources.changed():
        raise _SourcesChangedError(
            f"the CUDA sources were edited while {config.entry} ({config}) was compiled; nothing "
            "was kept of it"
        )


class _AfterCompiling:
    """A log that CuPy writes when NVRTC is done and before anything is stored.

    CuPy does not write it if the binary was in the cache. An exception raised here therefore keeps
    CuPy from storing the binary, on disk and in memory.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def write(self, _: str) -> None:
        self._act()


def _load(
    config: KernelConfig, text: str, root: Path, compiled: Callable[[], None]
) -> CompiledKernel:
    """A kernel from CuPy's cache, or a new one: ``compiled`` is then called, and may raise."""
    import cupy

    function = cupy.RawKernel(text, config.entry, compile_options(config, root))
    function.compile(_AfterCompiling(compiled))
    if config.shared_bytes > 48 * 1024:
        function.max_dynamic_shared_size_bytes = config.shared_bytes
    handle = int(function.kernel.ptr)
    return CompiledKernel(function, handle, function.num_regs, function.local_size_bytes)


@contextlib.contextmanager
def _nothing_on_disk() -> Iterator[None]:
    """Make CuPy keep what it compiles inside for this process only.

    CuPy reads the variable at every compilation. Another thread that compiles at the same time may
    then store nothing on disk either, which does no harm.
    """
    with _environment:
        before = os.environ.get(_IN_MEMORY)
        os.environ[_IN_MEMORY] = "1"
        try:
            yield
        finally:
            os.environ.pop(_IN_MEMORY)
            if before is not None:
                os.environ[_IN_MEMORY] = before


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
        Naming the searched places and the remedy.
    """
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except Exception as error:  # its type depends on the CuPy version and the platform
        raise ToolchainError(
            f"NVRTC could not be loaded ({error}); looked in: {', '.join(_library_folders())}; "
            f"{_REMEDY}"
        ) from error


def _library_folders() -> list[str]:
    """The folders that CuPy's search (cuda-pathfinder) covers for NVRTC, in order.

    They are NVIDIA's wheels of CUDA 13 and 12, a conda environment, the dynamic loader, and
    ``CUDA_PATH`` or ``CUDA_HOME``.
    """
    packages = [*site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        packages.append(site.getusersitepackages())
    folders = [
        os.path.join(package, "nvidia", *wheel, "lib")
        for package in packages
        for wheel in (("cu13",), ("cuda_nvrtc",))
    ]
    conda = os.environ.get("CONDA_PREFIX")
    folders += [os.path.join(conda, "lib")] if conda else []
    loader = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    folders += [*(folder for folder in loader if folder), "the loader's own folders"]
    toolkit = os.environ.get("CUDA_PATH") or os.environ.get("CUDA_HOME")
    folders += [os.path.join(toolkit, lib) for lib in ("lib64", "lib")] if toolkit else []
    return folders

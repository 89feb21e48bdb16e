"""The facts that a bug report needs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .config import VARIABLES
from .cuda.available import is_usable, require_device
from .cuda.kernel_cache import binaries, kernel_cache_folder
from .cuda.source import find_sources
from .errors import CuflashError
from .html_table import html_table
from .planning.device import DeviceLimits, HostLimits

__all__ = ["Info", "info"]

_PACKAGES = (
    "cuflash",
    "numpy",
    "ml_dtypes",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "cupy",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cuda-runtime",
    "nvidia-cuda-runtime-cu12",
    "jax",
)


class Texts(Mapping[str, str]):
    """An immutable, hashable mapping of texts."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = dict(texts)

    def __getitem__(self, name: str) -> str:
        return self._texts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def __hash__(self) -> int:
        return hash(frozenset(self._texts.items()))

    def __repr__(self) -> str:
        return repr(self._texts)


@dataclass(frozen=True)
class Info:
    """Versions, devices, cache and environment; ``print`` it, or show it in a notebook."""

    versions: Texts
    cuda: str  # "usable", or why not
    devices: tuple[DeviceLimits, ...]
    host: str  # the cache for which the NumPy backend chooses its blocks
    sources: str
    kernel_cache: str
    environment: Texts

    @property
    def sections(self) -> tuple[Mapping[str, str], ...]:
        """All facts under their printed names: versions, machine, environment."""
        devices = {f"device {i}": str(device) for i, device in enumerate(self.devices)}
        machine = {
            "CUDA": self.cuda,
            **devices,
            "CPU cache a core": self.host,
            "CUDA sources": self.sources,
            "kernel cache": self.kernel_cache,
        }
        return self.versions, machine, self.environment

    def __str__(self) -> str:
        return "\n".join(f"{name:<26}{value}" for name, value in self._rows())

    def _repr_html_(self) -> str:
        return html_table(self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        return [item for section in self.sections for item in section.items()]


def info() -> Info:
    """Versions, devices, kernel cache and environment of this process.

    Returns
    -------
    Info
        A frozen record that prints itself, and can be hashed.

    Examples
    --------
    >>> import cuflash
    >>> found = cuflash.info()
    >>> found.versions["cuflash"] == cuflash.__version__
    True
    """
    return Info(
        versions=Texts(_versions()),
        cuda=_cuda(),
        devices=_devices(),
        host=_host(),
        sources=_sources(),
        kernel_cache=_kernel_cache(),
        environment=Texts(_environment()),
    )


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if is_usable():
        import cupy
        from cupy.cuda import nvrtc, runtime

        versions["cupy (imported)"] = cupy.__version__
        versions["CUDA driver"] = str(runtime.driverGetVersion())
        try:
            versions["NVRTC"] = "{}.{}".format(*nvrtc.getVersion())
        except Exception as error:  # its type depends on the CuPy version and the platform
            versions["NVRTC"] = f"not loadable: {error}"
    return versions


def _cuda() -> str:
    try:
        require_device()
    except CuflashError as error:
        return str(error)
    return "usable"


def _devices() -> tuple[DeviceLimits, ...]:
    if not is_usable():
        return ()
    from cupy.cuda import runtime

    return tuple(DeviceLimits.query(i) for i in range(runtime.getDeviceCount()))


def _host() -> str:
    try:
        return f"{HostLimits.query().cache:,} bytes"
    except CuflashError as error:
        return str(error)


def _sources() -> str:
    try:
        return str(find_sources())
    except CuflashError as error:
        return str(error)


def _kernel_cache() -> str:
    folder = kernel_cache_folder()
    try:
        if not folder.is_dir():
            return f"{folder} (empty)"
        return f"{folder} ({len(binaries(folder)):,} binaries)"
    except OSError as error:  # the text matters most where something is wrong
        return f"{folder} ({error})"


def _environment() -> dict[str, str]:
    names = [name for name, _ in VARIABLES.values()]
    names += [name for name in os.environ if name.startswith("CUPY_")]
    names += ["CUDA_PATH", "CUDA_VISIBLE_DEVICES"]
    found = {name: os.environ[name] for name in names if name in os.environ}
    return {**found, "sys.executable": sys.executable}

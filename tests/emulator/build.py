"""Compiles a kernel of ``cuda_src`` for the CPU, and runs a grid of it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from cuflash.cuda.source import find_sources, include_closure, translation_unit
from cuflash.planning.kernel import KernelConfig

__all__ = [
    "KEPT",
    "Emulated",
    "Watch",
    "begin",
    "compiler",
    "emulate",
    "forget_threads",
    "last_blocks_first",
    "watched",
]

HERE = Path(__file__).parent / "cuda"
#: Environment variable: a folder for compiled kernels, which processes then share.
KEPT = "CUFLASH_EMULATOR_KEEPS"
#: Without the checks of a hardened compiler: fibers jump between stacks.
UNHARDENED = "-U_FORTIFY_SOURCE"
FLAGS = ("-std=c++20", "-O1", "-w", "-fPIC", "-ffp-contract=off", UNHARDENED)

#: The header that a kernel's text includes first: the emulator, and the kernel before ``Config``.
PRECOMPILED = "kernel.hpp"
#: The part of the emulator that kernels call, compiled once to a library.
SCHEDULER = "scheduler.hpp"

_ENTRY = """
namespace cuflash::{generation} {{
alignas(1024) unsigned char shared_bytes[256 * 1024];
}}
extern "C" void emulate(const void* params, int grid, int threads, long shared, void* watches,
                        int watch_count, int last_first) {{
  emulated::watches = static_cast<emulated::Watch*>(watches);
  emulated::watch_count = watch_count;
  emulated::last_first = last_first != 0;
  static unsigned launches = 0;  // variables of emulated:: are one for all kernels of a process
  emulated::launches = launches++;
  emulated::launch(grid, threads, shared, cuflash::{generation}::shared_bytes, {{{habits}}},
                   [&] {{ {entry}(*static_cast<const Params*>(params)); }});
}}
"""


class Watch(ctypes.Structure):
    """A range of memory, and the number of its bytes that kernels have copied to shared memory."""

    _fields_ = (
        ("begin", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
    )


_watches = (Watch * 0)()


@contextlib.contextmanager
def watched(arrays: Sequence[np.ndarray]) -> Iterator[Any]:
    """Within this context kernels count the bytes that they read of contiguous arrays."""
    global _watches
    spans = [(a.ctypes.data, a.ctypes.data + a.nbytes, 0) for a in arrays]
    _watches = (Watch * len(spans))(*spans)
    try:
        yield _watches
    finally:
        _watches = (Watch * 0)()


_last_first = False


@contextlib.contextmanager
def last_blocks_first() -> Iterator[None]:
    """Within this context blocks run from the last to the first, if none waits for another.

    If a block writes to rows of a later block, that block then does not overwrite them.
    """
    global _last_first
    _last_first = True
    try:
        yield
    finally:
        _last_first = False


class Emulated:
    """A compiled kernel."""

    def __init__(self, library: Path) -> None:
        self._run = ctypes.CDLL(str(library)).emulate
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        self._run.argtypes += [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]

    def __call__(self, grid: int, threads: int, shared_bytes: int, parameters: int) -> None:
        """Run the kernel; ``parameters`` is the address of a list of addresses, as in CUDA."""
        (first,) = (ctypes.c_void_p * 1).from_address(parameters)
        watches = ctypes.addressof(_watches)
        size = max(shared_bytes, 16)
        self._run(first, grid, threads, size, watches, len(_watches), int(_last_first))


def compiler() -> str | None:
    """The path of a C++ compiler, or None."""
    return shutil.which("g++")


#: Threads that run compilers, and the kernels that are compiled or under way.
_pool = ThreadPoolExecutor(os.cpu_count() or 1)
_made: dict[tuple[KernelConfig, str, str], Future[Path]] = {}
_lock = threading.Lock()


def forget_threads() -> None:
    """Start anew in a child of this process, which has none of its threads."""
    global _pool, _lock
    _pool, _lock = ThreadPoolExecutor(os.cpu_count() or 1), threading.Lock()
    _made.clear()


def emulate(config: KernelConfig) -> Emulated:
    """The kernel of a configuration, compiled once for each text of the sources."""
    return Emulated(begin(config).result())


def begin(config: KernelConfig) -> Future[Path]:
    """Start to compile a kernel in a thread."""
    root = find_sources()
    text = _text(config, root)
    digest = _digest(config, root, text)
    with _lock:
        key = (config, text, digest)
        if key not in _made:
            _made[key] = _pool.submit(_library, root, config, text, digest)
        return _made[key]


def _text(config: KernelConfig, root: Path) -> str:
    """The translation unit with another entry, and without lines that only NVRTC understands."""
    text = translation_unit(config, root)
    lines = [line for line in text.splitlines() if "__INTADDR__" not in line]
    lines.remove(_include(config))  # the precompiled header has it
    fa3 = config.generation == "fa3"
    # The fields of emulated::Habits.
    habits = (fa3, fa3 and config.kernel == "forward", not _waits(config))
    more = _ENTRY.format(
        generation=config.generation,
        entry=config.entry,
        habits=", ".join(str(habit).lower() for habit in habits),
    )
    return f'#include "{PRECOMPILED}"\n' + "\n".join(lines) + more


def _waits(config: KernelConfig) -> bool:
    """Whether blocks wait for earlier blocks: for their turn, or for cleared sums."""
    packed = any(feature.name == "packed_lengths" for feature in config.features)
    clears = (config.generation, config.kernel) == ("fa3", "backward") and not packed
    return clears or bool(dict(config.constants).get("ordered"))


def _include(config: KernelConfig) -> str:
    return f'#include "{config.generation}/{config.kernel}.cu"'


def _digest(config: KernelConfig, root: Path, text: str | None = None) -> str:
    """Digest of the files of a kernel, with the headers that ``text`` includes, or with all."""
    digest = hashlib.sha256()
    ours = [path for path in sorted(HERE.rglob("*")) if path.is_file()]
    features = sorted(root.glob("features/*.cuh"))
    of_features = [path for path in features if text is None or path.name in text]
    entries = [root / config.generation / f"{config.kernel}.cu", *of_features]
    theirs = dict.fromkeys(path for entry in entries for path in include_closure(root, entry))
    for path in [*theirs, *ours]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _folder() -> Path:
    """The folder of compiled kernels, of this process or of all that share ``KEPT``."""
    given = os.environ.get(KEPT)
    if given:
        return Path(given).absolute()
    made = Path(tempfile.mkdtemp(prefix="cuflash-emulator-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def _library(root: Path, config: KernelConfig, text: str, digest: str) -> Path:
    name = hashlib.sha256((text + digest).encode()).hexdigest()
    kept = _folder() / f"{name}.so"
    with _alone(name):
        if not kept.exists():
            headers = _precompiled(root, config)
            made = Path(tempfile.mkdtemp(dir=_folder()))
            (made / "kernel.cpp").write_text(text)
            sources = (made / "kernel.cpp", _scheduler())
            _gcc("-shared", f"-I{headers}", *sources, "-o", made / "kernel.so")
            (made / "kernel.so").replace(kept)
            shutil.rmtree(made)
    return kept


def _scheduler() -> Path:
    """The library that runs the threads of all kernels."""
    text = b"".join(path.read_bytes() for path in sorted(HERE.glob("*.h*")))
    kept = _folder() / f"scheduler-{hashlib.sha256(text).hexdigest()}.so"
    with _alone(kept.name):
        if not kept.exists():
            made = Path(tempfile.mkdtemp(dir=_folder()))
            _gcc("-shared", "-x", "c++", HERE / SCHEDULER, "-o", made / SCHEDULER)
            (made / SCHEDULER).replace(kept)
            made.rmdir()
    return kept


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """Within this context one thread of one process makes a file; others wait until it exists."""
    with open(_folder() / f"{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a child of this process may have the file open


def _precompiled(root: Path, config: KernelConfig) -> Path:
    """A folder with the sources and a precompiled header for all configurations of a kernel."""
    digest = _digest(config, root)
    kept = _folder() / f"{config.generation}-{config.kernel}-{digest}"
    with _alone(kept.name):
        if not kept.exists():
            made = Path(tempfile.mkdtemp(dir=_folder()))
            _copy_sources(root, made)
            header = made / PRECOMPILED
            header.write_text(f'#include "emulated.hpp"\n{_include(config)}\n')
            _gcc("-x", "c++-header", f"-I{made}", header, "-o", f"{header}.gch")
            made.rename(kept)
    return kept


def _copy_sources(root: Path, folder: Path) -> None:
    """Copy the kernels, with the emulator's stand-ins for CUDA's headers and for PTX."""
    shutil.copytree(root, folder, dirs_exist_ok=True)
    for path in (HERE / "ptx").iterdir():
        shutil.copy(path, folder / "ptx" / path.name)
    for path in HERE.glob("*.h*"):
        shutil.copy(path, folder / path.name)


def _gcc(*arguments: str | Path) -> None:
    command = ["g++", *FLAGS, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]

"""Compiles a kernel of ``cuda_src`` for the CPU, and runs a grid of it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from cuflash.cuda.source import find_sources, include_closure, translation_unit
from cuflash.planning.kernel import KernelConfig

__all__ = ["KEPT", "Emulated", "begin", "compiler", "emulate"]

HERE = Path(__file__).parent / "cuda"
#: Environment variable: a folder for what is compiled, which processes then share.
KEPT = "CUFLASH_EMULATOR_KEEPS"
#: Without the checks of a hardened compiler: fibers jump between stacks.
UNHARDENED = "-U_FORTIFY_SOURCE"
FLAGS = ("-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-ffp-contract=off", UNHARDENED)

_ENTRY = """
namespace cuflash::{generation} {{
alignas(1024) unsigned char shared_bytes[256 * 1024];
}}
extern "C" void emulate(const void* params, int grid, int threads, long shared) {{
  static unsigned launches = 0;  // variables of emulated:: are one for all kernels of a process
  emulated::launches = launches++;
  emulated::launch(grid, threads, shared, cuflash::{generation}::shared_bytes, {{{habits}}},
                   [&] {{ {entry}(*static_cast<const cuflash::{struct}*>(params)); }});
}}
"""


class Emulated:
    """A compiled kernel."""

    def __init__(self, library: Path) -> None:
        self._run = ctypes.CDLL(str(library)).emulate
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_long]

    def __call__(self, grid: int, threads: int, shared_bytes: int, parameters: int) -> None:
        """Run it; ``parameters`` is the address of a list of addresses, as the driver takes it."""
        (first,) = (ctypes.c_void_p * 1).from_address(parameters)
        self._run(first, grid, threads, max(shared_bytes, 16))


def compiler() -> str | None:
    """A C++ compiler, if there is one."""
    return shutil.which("g++")


#: Compilers that run at a time, and what they have made or are making.
_pool = ThreadPoolExecutor(os.cpu_count() or 1)
_made: dict[tuple[KernelConfig, str, str], Future[Path]] = {}
_lock = threading.Lock()


def emulate(config: KernelConfig) -> Emulated:
    """The kernel of a configuration; compiled once for each text of the sources."""
    return Emulated(begin(config).result())


def begin(config: KernelConfig) -> Future[Path]:
    """Have it compiled beside other work, to be there when it is asked for."""
    root = find_sources()
    text, digest = _text(config, root), _digest(config, root)
    with _lock:
        key = (config, text, digest)
        if key not in _made:
            _made[key] = _pool.submit(_library, root, text, digest)
        return _made[key]


def _text(config: KernelConfig, root: Path) -> str:
    """The translation unit without what only NVRTC understands, and with an entry of ours."""
    text = translation_unit(config, root)
    lines = [line for line in text.splitlines() if "__INTADDR__" not in line]
    struct = re.search(r"const __grid_constant__ cuflash::(\w+) params", text)
    assert struct, text
    fa3 = config.generation == "fa3"
    habits = (fa3, fa3 and config.kernel == "forward")  # as emulated::Habits
    more = _ENTRY.format(
        generation=config.generation,
        entry=config.entry,
        struct=struct[1],
        habits=", ".join(str(habit).lower() for habit in habits),
    )
    return '#include "emulated.hpp"\n' + "\n".join(lines) + more


def _digest(config: KernelConfig, root: Path) -> str:
    digest = hashlib.sha256()
    ours = [path for path in sorted(HERE.rglob("*")) if path.is_file()]
    for path in [*include_closure(root, root / config.generation / f"{config.kernel}.cu"), *ours]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _folder() -> Path:
    """Where this process keeps what it compiles, or several that have been given a place."""
    given = os.environ.get(KEPT)
    return Path(given) if given else Path(tempfile.mkdtemp(prefix="cuflash-emulator-"))


def _library(root: Path, text: str, digest: str) -> Path:
    kept = _folder() / f"{hashlib.sha256((text + digest).encode()).hexdigest()}.so"
    if not kept.exists():
        _compile(root, text).replace(kept)
    return kept


def _compile(root: Path, text: str) -> Path:
    folder = Path(tempfile.mkdtemp(dir=_folder()))
    shutil.copytree(root, folder / "src")
    for path in (HERE / "ptx").iterdir():
        shutil.copy(path, folder / "src" / "ptx" / path.name)
    for path in HERE.glob("*.h*"):
        shutil.copy(path, folder / "src" / path.name)
    (folder / "kernel.cpp").write_text(text)
    command = ["g++", *FLAGS, f"-I{folder / 'src'}", str(folder / "kernel.cpp")]
    done = subprocess.run(
        [*command, "-o", str(folder / "kernel.so")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "kernel.so"

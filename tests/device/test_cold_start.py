"""The first call of a process with CuPy's kernel cache intact or damaged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cuflash.cuda.kernel_cache import binaries

from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.oracle import Truth, judge

CASE = Case(2, 4, 2, 200, 264, dtype="float16", causal=True)
#: The command that compiles for CASE; its lengths are given because it is short.
COMPILE = "compile --head-dim 64 --dtype float16 --operation forward --mask causal --seqlen 200/264"
SECONDS = 300

_CALL = """
import sys
import cupy
import numpy as np
import cuflash
given, made = sys.argv[1:]
with np.load(given) as x:
    out = cuflash.attention(*(cupy.asarray(x[name]) for name in "qkv"), causal=True)
np.save(made, out.get())
"""


class Process:
    """Runs processes with a kernel cache of their own."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        self.cache = folder / "cache"
        self.said = ""  # the last call's output, for people
        names = [name for name in os.environ if name.startswith("CUPY_CACHE_")]
        others = {name: value for name, value in os.environ.items() if name not in names}
        self.environment = {**others, "CUPY_CACHE_DIR": str(self.cache)}
        x = arrays(CASE, "q", "k", "v")
        self.truth: Truth = judge(CASE, x)
        np.savez(folder / "given.npz", **x)

    def start(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-u", *command],
            cwd=self.root,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def start_call(self, made: str = "made.npy", before: str = "") -> subprocess.Popen[str]:
        return self.start(
            "-c", before + _CALL, str(self.folder / "given.npz"), str(self.folder / made)
        )

    def end_call(self, process: subprocess.Popen[str], made: str = "made.npy") -> np.ndarray:
        """The correct results of a call."""
        _, self.said = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, self.said
        out: np.ndarray = np.load(self.folder / made)
        (self.folder / made).unlink()
        compare(self.truth, "out", out).check()
        return out

    def call(self) -> np.ndarray:
        return self.end_call(self.start_call())

    def command(self, *command: str) -> str:
        process = self.start("-m", "cuflash", *command)
        printed, said = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, said
        return printed

    def compiled(self) -> dict[str, int]:
        """Every binary of the cache with its time; the cache has no other files."""
        found = binaries(self.cache)
        assert sorted(found) == sorted(path.name for path in self.cache.iterdir())
        return found


@pytest.fixture
def process(root: Path, tmp_path: Path) -> Iterator[Process]:
    return Process(root, tmp_path)


def test_a_second_process_compiles_nothing(process: Process) -> None:
    first = process.call()
    compiled = process.compiled()
    assert len(compiled) >= 1
    assert (process.call() == first).all()
    assert process.compiled() == compiled


def test_processes_that_start_together_leave_whole_kernels(process: Process) -> None:
    names = [f"{i}.npy" for i in range(3)]
    calls = [process.start_call(name) for name in names]
    first, *others = [process.end_call(c, n) for c, n in zip(calls, names, strict=True)]
    assert all((other == first).all() for other in others)
    compiled = process.compiled()
    process.call()
    assert process.compiled() == compiled


def _change(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize(
    "damage",
    [_change, lambda data: data[: len(data) // 2], lambda data: data[:40], lambda data: b""],
    ids=["changed", "half", "digest", "empty"],
)
def test_a_damaged_kernel_is_compiled_again(
    process: Process, damage: Callable[[bytes], bytes]
) -> None:
    expected = process.call()
    before = process.compiled()
    for name in before:
        path = process.cache / name
        path.write_bytes(damage(path.read_bytes()))
        os.utime(path, ns=(0, 0))  # so that a rewritten file shows by its time
    assert (process.call() == expected).all()
    mended = process.compiled()
    assert set(mended) == set(before)
    assert 0 not in mended.values()
    process.call()
    assert process.compiled() == mended  # and the file that replaced it is complete


def test_a_kernel_that_cannot_be_read_is_compiled_for_the_process(process: Process) -> None:
    expected = process.call()
    for name in binaries(process.cache):
        (process.cache / name).unlink()
        (process.cache / name).mkdir()  # permissions do not stop the superuser, a folder does
    assert (process.call() == expected).all()
    assert "CUPY_CACHE_DIR" in process.said


@pytest.mark.parametrize("mode", [0o555, 0o000], ids=["read-only", "locked"])
def test_a_folder_without_permissions_gives_the_same_answer(process: Process, mode: int) -> None:
    process.cache.mkdir()
    process.cache.chmod(mode)
    try:
        process.call()
    finally:
        process.cache.chmod(0o755)
    if os.geteuid():  # the superuser may write there
        assert "CUPY_CACHE_DIR" in process.said
        assert not process.compiled()


def test_a_folder_that_has_gone_gives_the_same_answer(process: Process) -> None:
    gone = "import cupy, os\nos.rmdir(os.environ['CUPY_CACHE_DIR'])\n"
    process.end_call(process.start_call(before=gone))
    assert "CUPY_CACHE_DIR" in process.said
    assert not process.cache.exists()


def test_what_the_command_compiles_the_first_call_finds(process: Process) -> None:
    printed = process.command(*COMPILE.split()).splitlines()
    compiled = process.compiled()
    assert len(compiled) == len(printed) - 1
    assert f"{len(compiled)} compiled, 0 there already" in printed[-1]
    process.call()
    assert process.compiled() == compiled
    assert f"0 compiled, {len(compiled)} there already" in process.command(*COMPILE.split())
    assert process.compiled() == compiled


def test_an_interrupted_command_leaves_whole_kernels(process: Process) -> None:
    # Many more kernels than threads: the second command still has some to compile.
    options = "--head-dim 64,128 --dtype float16 --seqlen 200/264 --threads 2"
    command = ("compile", *options.split())
    started = process.start("-m", "cuflash", *command)
    assert started.stdout is not None
    assert started.stdout.readline().startswith("1/")  # some are under way
    started.send_signal(signal.SIGINT)
    _, said = started.communicate(timeout=SECONDS)
    assert started.returncode == 130, said
    assert "Traceback" not in said
    kept = process.compiled()
    assert len(kept) >= 1
    total = int(process.command(*command).splitlines()[-1].split()[0])
    everything = process.compiled()
    assert len(kept) < len(everything) == total
    assert all(everything[name] == when for name, when in kept.items())

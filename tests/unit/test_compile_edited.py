"""Sources that are edited during compilation, and plans that need no sources. No GPU needed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cuflash.cuda import compile as compiling
from cuflash.cuda.launch import PreparedPlan
from cuflash.cuda.source import Sources, include_closure
from cuflash.errors import CompileError, ToolchainError
from cuflash.planning.plan import plan

from ..architectures import LIMITS
from .test_plan import PLAIN

CONFIGS = [
    launch.config
    for launch in plan(replace(PLAIN, operation="backward"), LIMITS["80"], algorithm="fa2").launches
]
HEADER = "tile/sequence.cuh"  # every kernel of CONFIGS includes it


class FakeCompiler:
    """Replaces CuPy's compiler: a binary is the files that it read, stored under its text."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stored: dict[str, dict[str, bytes]] = {}
        self.compiled = 0
        self.during: Callable[[], object] = lambda: None  # called during every compilation
        self.fails: type[Exception] | None = None

    def kernel(self, text: str, entry: str, options: tuple[str, ...]) -> Any:
        """Replaces cupy.RawKernel."""
        function = SimpleNamespace(kernel=SimpleNamespace(ptr=1), num_regs=0, local_size_bytes=0)
        function.compile = lambda log: self._compile(text, log)
        return function

    def _compile(self, text: str, log: Any) -> None:
        if text in self.stored:
            return
        self.compiled += 1
        binary = self._closure(text)
        self.during()
        if self.fails is not None:
            raise self.fails("an unfinished file")
        log.write("")
        self.stored[text] = binary

    def _closure(self, text: str) -> dict[str, bytes]:
        entry = self.root / text.split(",")[0].removeprefix("// ")
        return {path.name: path.read_bytes() for path in include_closure(self.root, entry)}

    def check(self) -> None:
        """A stored binary holds the current sources if and only if its text has their digest."""
        assert self.stored
        for text, binary in self.stored.items():
            name, digest = text.splitlines()[0].removeprefix("// ").split(", sources ")
            generation, kernel = name.removesuffix(".cu").split("/")
            now = Sources(self.root).digest(generation, kernel)
            assert (digest == now) == (binary == self._closure(text)), name

    def digests(self) -> set[str]:
        """The digests of the stored binaries."""
        return {text.splitlines()[0].split()[-1] for text in self.stored}


@pytest.fixture
def compiler(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    folder = Path(shutil.copytree(root / "cuda_src", tmp_path / "cuda_src"))
    fake = FakeCompiler(folder)
    monkeypatch.setenv("CUFLASH_CUDA_SRC", str(folder))
    monkeypatch.setattr(compiling, "_kernels", compiling._Once())
    monkeypatch.setattr(cupy, "RawKernel", fake.kernel)
    monkeypatch.setattr(cupy.cuda, "Device", lambda device_id: contextlib.nullcontext())
    return fake


def _edit(path: Path) -> None:
    path.write_text(path.read_text() + "// edited\n")


@pytest.mark.parametrize("which", range(1, 1 + len(CONFIGS)))
def test_an_edit_during_a_compilation_is_under_no_other_digest(
    compiler: FakeCompiler, which: int
) -> None:
    """Whichever kernel is being compiled during the edit, all kernels get the edited sources."""

    def edit() -> None:
        if compiler.compiled == which:
            _edit(compiler.root / HEADER)

    compiler.during = edit
    made = compiling.compile_kernels(CONFIGS, 0)
    assert compiler.compiled == which + len(CONFIGS)  # the edit has all compiled again
    assert len(compiler.stored) == which - 1 + len(CONFIGS)
    compiler.check()
    now = {Sources(compiler.root).digest(c.generation, c.kernel) for c in CONFIGS}
    assert now <= compiler.digests()
    assert compiling.compile_kernels(CONFIGS, 0) == made
    assert compiler.compiled == which + len(CONFIGS)


def test_an_edit_that_is_taken_back_meanwhile_is_noticed(compiler: FakeCompiler) -> None:
    header = compiler.root / HEADER
    text = header.read_text()

    def edit_and_take_back() -> None:
        if compiler.compiled == 1:
            _edit(header)
            header.write_text(text)
            os.utime(header, ns=(1, 1))

    compiler.during = edit_and_take_back
    compiling.compile_kernels(CONFIGS[:1], 0)
    assert compiler.compiled == 2


def test_an_edit_before_the_compiler_reads_is_noticed(compiler: FakeCompiler) -> None:
    """An edit after the digest and before the compilation gives new text an old digest."""
    sources = Sources(compiler.root)
    old = sources.digest(CONFIGS[0].generation, CONFIGS[0].kernel)
    _edit(compiler.root / HEADER)
    with pytest.raises(CompileError, match=r"edited while cuflash_\w+ .*nothing was kept"):
        compiling._build(CONFIGS[0], sources, 0, False)
    assert compiler.stored == {}
    compiling.compile_kernels(CONFIGS[:1], 0)
    assert compiler.digests().isdisjoint({old})


def test_an_edit_of_what_other_kernels_include_has_all_compiled_again(
    compiler: FakeCompiler,
) -> None:
    """The second kernel, during which the edit comes, does not include the edited files."""

    def edit() -> None:
        if compiler.compiled == 2:
            for name in ("steps/statistics.cu", "steps/convert_dq.cu"):
                _edit(compiler.root / name)

    compiler.during = edit
    compiling.compile_kernels(CONFIGS, 0)
    compiler.check()
    for config in CONFIGS:
        now = Sources(compiler.root).digest(config.generation, config.kernel)
        assert now in compiler.digests(), config.kernel


@pytest.mark.parametrize("gone", [False, True])
def test_sources_that_never_rest_are_an_error_that_leaves_nothing(
    compiler: FakeCompiler, gone: bool
) -> None:
    header = compiler.root / HEADER
    kept = header.read_bytes()
    compiler.during = header.unlink if gone else lambda: _edit(header)
    with pytest.raises(ToolchainError if gone else CompileError):
        compiling.compile_kernels(CONFIGS[:1], 0)
    assert compiler.compiled == (1 if gone else compiling._TRIES)
    assert (compiler.stored, len(compiling._kernels)) == ({}, 0)
    compiler.during = lambda: None
    header.write_bytes(kept)
    compiling.compile_kernels(CONFIGS[:1], 0)
    compiler.check()


def test_a_file_that_an_editor_writes_anew_is_waited_for(
    compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = compiler.root / HEADER
    text = header.read_bytes()
    header.unlink()
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            header.write_bytes(text)

    monkeypatch.setattr(compiling.time, "sleep", wait)
    compiling.compile_kernels(CONFIGS[:1], 0)
    assert len(waits) == 2
    compiler.check()


def test_a_file_of_the_same_time_and_size_is_another_file(compiler: FakeCompiler) -> None:
    header = compiler.root / HEADER
    before = Sources(compiler.root).digest(CONFIGS[0].generation, CONFIGS[0].kernel)
    stat, text = header.stat(), header.read_text()
    header.write_text(text.replace("Sequence", "Eequence", 1))
    os.utime(header, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert header.stat().st_size == stat.st_size
    assert Sources(compiler.root).digest(CONFIGS[0].generation, CONFIGS[0].kernel) != before


def test_what_the_compiler_refuses_of_a_file_half_written_is_tried_again(
    compiler: FakeCompiler,
) -> None:
    from cupy.cuda.compiler import CompileException

    def edit() -> None:
        _edit(compiler.root / HEADER)
        compiler.fails = Refused if compiler.compiled == 1 else None

    class Refused(CompileException):  # type: ignore[misc]
        def __init__(self, log: str) -> None:
            super().__init__(log, "", "", ())

    compiler.during = lambda: edit() if compiler.compiled <= 2 else None
    compiling.compile_kernels(CONFIGS[:1], 0)
    assert compiler.compiled == 3
    compiler.check()


def test_kernels_that_are_there_already_look_at_every_file_once(
    compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling.compile_kernels(CONFIGS, 0)
    seen: list[str] = []
    real = os.stat

    def look(path: Any, **named: Any) -> os.stat_result:
        if str(path).endswith((".cu", ".cuh")):
            seen.append(os.path.relpath(path, compiler.root))
        return real(path, **named)

    monkeypatch.setattr(compiling, "_kernels", compiling._Once())  # as in another process
    monkeypatch.setattr(os, "stat", look)
    compiling.compile_kernels(CONFIGS, 0)
    monkeypatch.undo()
    seen.remove("params.cuh")  # read once more, to find the folder
    assert compiler.compiled == len(CONFIGS)
    assert len(seen) == len(set(seen)) > len(CONFIGS)


def test_cupy_writes_its_log_after_compiling_and_before_storing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CuPy and NVRTC run for real. If writing the log raises, so does CuPy, and stores nothing."""
    compiler = pytest.importorskip("cupy.cuda.compiler", reason="CuPy is not installed")
    events: list[str] = []
    stored: dict[str, bytes] = {}

    def save(name: str, payload: bytes, source: str) -> None:
        events.append("save")
        stored[name] = payload

    class Loaded:
        def __init__(self) -> None:
            self.load = lambda binary: events.append("load")
            self._set_mapping = lambda mapping: None

    def compile_now(act: Callable[[], None]) -> None:
        compiler._compile_with_cache_cuda(
            'extern "C" __global__ void f() {}', (), "90", log_stream=compiling._AfterCompiling(act)
        )

    def refuse() -> None:
        raise compiling._SourcesChangedError("edited")

    monkeypatch.setattr(
        compiler, "_kernel_cache_backend", SimpleNamespace(load=stored.get, save=save)
    )
    monkeypatch.setattr(compiler.function, "Module", Loaded)
    monkeypatch.setattr(  # the real function asks a device
        compiler, "_get_arch_for_options_for_nvrtc", lambda arch=None: ("-arch=sm_90", "cubin")
    )
    with pytest.raises(compiling._SourcesChangedError):
        compile_now(refuse)
    assert (events, stored) == ([], {})
    compile_now(lambda: events.append("log"))
    compile_now(lambda: events.append("log"))  # found in the cache
    assert events == ["log", "save", "load", "load"]


def test_nothing_to_launch_needs_no_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    monkeypatch.setenv("CUFLASH_CUDA_SRC", str(tmp_path))
    empty = plan(replace(PLAIN, batch=0), LIMITS["90"])
    prepared = PreparedPlan(empty, dict.fromkeys("qkv", (1, 1, 1)), 0)
    assert prepared.kernels == []
    prepared.launch((0, 0, 0), 0, 0)
    with pytest.raises(ToolchainError, match="sources were not found"):
        compiling.compile_kernel(CONFIGS[0], 0)

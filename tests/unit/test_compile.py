"""Kernels are compiled once, and errors say why one cannot be compiled. No GPU needed."""

from __future__ import annotations

import contextlib
import os
import site
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cuflash.cuda import compile as compiling
from cuflash.cuda.source import Sources, find_sources
from cuflash.errors import CompileError, ToolchainError
from cuflash.planning.plan import plan

from ..architectures import LIMITS
from .test_plan import PLAIN

CONFIG = plan(PLAIN, LIMITS["90"], algorithm="fa1").launches[0].config


def test_sixteen_threads_compile_once() -> None:
    once, made, answers = compiling._Once(), [], []
    start = threading.Barrier(16)

    def make() -> Any:
        made.append(threading.get_ident())
        time.sleep(0.05)
        return object()

    def ask() -> None:
        start.wait()
        answers.append(once.get("key", make))

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(answers) == 16
    assert len(set(map(id, answers))) == 1


def test_a_failure_is_not_kept_and_waiters_try_again() -> None:
    once, attempts = compiling._Once(), []

    def fail_first() -> Any:
        attempts.append(1)
        if len(attempts) == 1:
            raise KeyboardInterrupt
        return object()

    with pytest.raises(KeyboardInterrupt):
        once.get("key", fail_first)
    assert once.get("key", fail_first) is once.get("key", fail_first)
    assert len(attempts) == 2


def test_different_keys_do_not_wait_for_each_other() -> None:
    once, release = compiling._Once(), threading.Event()

    def slow() -> Any:
        release.wait(10)
        return object()

    thread = threading.Thread(target=once.get, args=("slow", slow))
    thread.start()
    assert once.get("quick", object) is not None
    release.set()
    thread.join()


def test_sixteen_threads_that_ask_first_for_a_kernel_have_it_built_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first attempt fails: its thread gets the error, and the other threads get the kernel."""
    built: list[int] = []
    start = threading.Barrier(16)

    def build(*_: Any) -> Any:
        built.append(threading.get_ident())
        time.sleep(0.05)
        if len(built) == 1:
            raise CompileError("out of memory")
        return object()

    def ask(_: int) -> Any:
        start.wait()
        try:
            return compiling.compile_kernel(replace(CONFIG), 0)  # an equal key, another object
        except CompileError as error:
            return error

    monkeypatch.setattr(compiling, "_kernels", compiling._Once())
    monkeypatch.setattr(compiling, "_build", build)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))
    failed = [answer for answer in answers if isinstance(answer, CompileError)]
    assert len(built) == 2
    assert len(failed) == 1
    assert len({id(answer) for answer in answers if answer not in failed}) == 1


def test_a_kernel_of_another_device_or_configuration_is_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiling, "_kernels", compiling._Once())
    monkeypatch.setattr(compiling, "_build", lambda *given: object())
    other = replace(CONFIG, architecture="sm_80")
    asked = [(CONFIG, 0), (CONFIG, 1), (other, 0)]
    found = [compiling.compile_kernel(*key) for key in (*asked, *asked)]
    assert len(set(map(id, found))) == 3
    assert found[:3] == found[3:]


@pytest.mark.parametrize(
    "log",
    [
        'kern.cu(3): catastrophic error: cannot open source file "cuda_fp16.h"',
        'a.cu(1): error: could not open source file "cuda_bf16.h" (no directories in search list)',
    ],
)
def test_a_missing_header_names_folders_and_remedy(log: str) -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    error = compiling._compile_error(CONFIG, log)
    assert isinstance(error, ToolchainError)
    assert "looked in: /" in str(error)
    assert "pip install" in str(error)


def test_other_compiler_errors_keep_the_log_and_the_configuration() -> None:
    error = compiling._compile_error(CONFIG, 'x.cu(7): error: identifier "foo" is undefined')
    assert isinstance(error, CompileError)
    assert '"foo" is undefined' in str(error)
    assert "block_kv" in str(error)


def test_missing_nvrtc_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

    def fail() -> None:
        raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr(cupy.cuda.nvrtc, "getVersion", fail)
    compiling.require_toolchain.cache_clear()
    monkeypatch.setenv("CUDA_PATH", "/opt/toolkit")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/one:/opt/two")
    monkeypatch.setenv("CONDA_PREFIX", "/opt/conda")
    with pytest.raises(
        ToolchainError, match=r"libnvrtc\.so\.13.*'cuflash\[cuda13\]', or '\.\[cuda13\]'"
    ) as caught:
        compiling.require_toolchain()
    looked = str(caught.value).split("looked in: ")[1].split(";")[0].split(", ")
    packages = site.getsitepackages()[0]
    assert {
        f"{packages}/nvidia/cu13/lib",
        f"{packages}/nvidia/cuda_nvrtc/lib",
        "/opt/conda/lib",
        "/opt/one",
        "/opt/two",
        "/opt/toolkit/lib64",
        "/opt/toolkit/lib",
    } <= set(looked)
    monkeypatch.undo()
    compiling.require_toolchain.cache_clear()
    compiling.require_toolchain()


def test_a_kernel_with_jitter_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_kernels", compiling._Once())
    monkeypatch.setattr(compiling, "_build", lambda *given: [given[-1]])
    found = []
    for value in ("0", "1", "", "1"):
        monkeypatch.setenv("CUFLASH_JITTER", value)
        found.append(compiling.compile_kernel(CONFIG, 0))
    assert found == [[False], [True], [False], [True]]
    assert len(compiling._kernels) == 2


def test_only_a_special_architecture_is_named_to_the_compiler(tmp_path: Any) -> None:
    assert not any("-arch" in o for o in compiling.compile_options(CONFIG, tmp_path))
    special = replace(CONFIG, architecture="sm_90a")
    assert "-arch=sm_90a" in compiling.compile_options(special, tmp_path)


@pytest.mark.parametrize("refused", ["compile", "max_dynamic_shared_size_bytes"])
def test_what_the_driver_refuses_is_a_compile_error(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

    class RefusedError(Exception):
        pass

    def refuse(*_: Any) -> None:
        raise RefusedError("CUDA_ERROR_INVALID_VALUE")

    class Function:
        num_regs = local_size_bytes = 0
        max_dynamic_shared_size_bytes = property(lambda self: 0, refuse)

        def __init__(self, *_: Any) -> None:
            self.compile = refuse if refused == "compile" else lambda log: None

    monkeypatch.setattr(cupy.cuda.driver, "CUDADriverError", RefusedError)
    monkeypatch.setattr(cupy.cuda, "Device", lambda device_id: contextlib.nullcontext())
    monkeypatch.setattr(cupy, "RawKernel", Function)
    assert CONFIG.shared_bytes > 48 * 1024
    with pytest.raises(
        CompileError, match=r"the driver refused cuflash_fa1_forward.*INVALID_VALUE"
    ) as caught:
        compiling._build(CONFIG, Sources(find_sources()), 0, False)
    assert "block_kv" in str(caught.value)


@pytest.mark.parametrize("before", [None, "0"])
def test_a_cache_that_cannot_be_used_costs_a_compilation(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    seen: list[str | None] = []

    class Function:
        num_regs = local_size_bytes = max_dynamic_shared_size_bytes = 0
        kernel = SimpleNamespace(ptr=77)

        def __init__(self, *_: Any) -> None:
            seen.append(os.environ.get("CUPY_CACHE_IN_MEMORY"))

        def compile(self, log: Any) -> None:
            if seen[-1] != "1":
                raise PermissionError(13, "Permission denied", "/cache/tmp")

    if before is None:
        monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    else:
        monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", before)
    monkeypatch.setattr(cupy.cuda, "Device", lambda device_id: contextlib.nullcontext())
    monkeypatch.setattr(cupy, "RawKernel", Function)
    with pytest.warns(RuntimeWarning, match=r"Permission denied.*/cache/tmp.*CUPY_CACHE_DIR"):
        made = compiling._build(CONFIG, Sources(find_sources()), 0, False)
    assert made.function.max_dynamic_shared_size_bytes == CONFIG.shared_bytes
    assert made.handle == 77
    assert seen == [before, "1"]
    assert os.environ.get("CUPY_CACHE_IN_MEMORY") == before

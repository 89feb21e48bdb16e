"""How kernels are compiled ahead, for which device, and into which folder. No GPU needed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from cuflash import compile_ahead as ahead
from cuflash.compile_ahead import device_of
from cuflash.cuda import kernel_cache
from cuflash.errors import ArgumentValueError, BackendUnavailableError, UnsupportedError

from ..architectures import LIMITS


def test_without_a_gpu_it_says_why_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BackendUnavailableError("there is no CUDA device")

    monkeypatch.setattr(ahead, "require_device", refuse)
    for architecture in (None, "sm_90"):
        with pytest.raises(BackendUnavailableError, match=r"no CUDA device.*CUPY_CACHE_DIR"):
            device_of(architecture)


def test_an_architecture_is_one_of_a_device_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [LIMITS["80"], LIMITS["90"], LIMITS["90"]]
    monkeypatch.setattr(ahead, "require_device", lambda: 2)
    monkeypatch.setattr(ahead, "device_count", lambda: 3)
    monkeypatch.setattr(ahead.DeviceLimits, "query", there.__getitem__)
    assert device_of() == 2
    assert {device_of(name) for name in ("sm_90", "sm_90a", "90", "9.0")} == {2}
    assert device_of("sm_80") == 0
    with pytest.raises(UnsupportedError, match=r"sm_120, there is sm_90, sm_80.*CUPY_CACHE_DIR"):
        device_of("sm_120")
    with pytest.raises(ArgumentValueError, match=r"arch: got 'hopper'"):
        device_of("hopper")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder as CuPy's kernel cache; no compiler is required."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    monkeypatch.setattr(ahead, "require_toolchain", lambda: None)
    return tmp_path / "cache"


def test_kernels_are_compiled_side_by_side_and_counted(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting, told = threading.Barrier(3), []
    cache.mkdir()
    for name in ("0", "1"):
        (cache / f"{name}.cubin").write_text("old")

    def build(kernel: Any, device: int) -> None:
        meeting.wait(10)  # raises unless three wait together
        assert device == 5
        if kernel == 0:  # the stored binary 0 is damaged, and 1 is valid
            (cache / "0.cubin").write_text("new")
        if kernel == 2:
            (cache / "2.cubin").write_text("new")
            (cache / "2.cubin.cu").write_text("its source")

    monkeypatch.setattr(ahead, "compile_kernel", build)
    kernels: Any = [0, 1, 2]
    outcome = ahead.compile_ahead(kernels, 5, told.append, threads=3)
    assert sorted(told) == kernels
    assert (outcome.kernels, outcome.compiled, outcome.found) == (3, 2, 1)
    assert outcome.folder == cache


@pytest.mark.parametrize("interrupted", [True, False])
def test_what_is_under_way_ends_and_nothing_else_begins(
    cache: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    begun, ended, slow = [], [], threading.Event()

    def build(kernel: int, device: int) -> None:
        begun.append(kernel)
        if kernel == 0:
            slow.wait(0.3)
        elif kernel == 1 and not interrupted:
            raise UnsupportedError("refused")
        elif kernel > 1:
            slow.wait(0.1)
        ended.append(kernel)

    def told(kernel: Any) -> None:
        if interrupted:
            raise KeyboardInterrupt

    monkeypatch.setattr(ahead, "compile_kernel", build)
    kernels: Any = list(range(40))
    with pytest.raises(KeyboardInterrupt if interrupted else UnsupportedError):
        ahead.compile_ahead(kernels, 0, told, threads=2)
    count = len(begun)
    assert count < 10
    assert len(ended) == count - (not interrupted)
    slow.wait(0.3)
    assert len(begun) == count


def test_a_cache_that_keeps_nothing_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "compile_kernel", lambda *_: pytest.fail("compiled"))
    kernels: Any = [0]
    cache.write_text("a file where the folder should be")
    with pytest.raises(ArgumentValueError, match=r"CUPY_CACHE_DIR: got .*cache \("):
        ahead.compile_ahead(kernels, 0, print)
    cache.unlink()
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    with pytest.raises(ArgumentValueError, match="CUPY_CACHE_IN_MEMORY"):
        ahead.compile_ahead(kernels, 0, print)


def test_a_folder_without_room_for_files_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    assert kernel_cache.require_kernel_cache() == cache
    assert list(cache.iterdir()) == []
    monkeypatch.setattr(kernel_cache.tempfile, "TemporaryFile", refuse)
    with pytest.raises(ArgumentValueError, match=r"CUPY_CACHE_DIR.*Permission denied"):
        kernel_cache.require_kernel_cache()


def test_the_folder_is_the_one_that_cupy_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = pytest.importorskip("cupy.cuda.compiler", reason="CuPy is not installed")
    used = compiler._kernel_cache_backend._cache_dir  # decided when CuPy was imported
    assert kernel_cache.kernel_cache_folder() == Path(used)

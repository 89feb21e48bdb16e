"""Calls of launch tables to CUDA's driver: functions, contexts, and counters of tiles."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuflash.jax", reason="JAX is not installed")
pytest.importorskip("cupy", reason="CuPy is not installed")
import cupy

from cuflash.jax.native import driver
from cuflash.jax.native.layout import Driver

_MEANT = {
    Driver.launch: "cuLaunchKernelEx",
    Driver.encode: "cuTensorMapEncodeTiled",
    Driver.memset: "cuMemsetD32Async",
    Driver.is_capturing: "cuStreamIsCapturing",
    Driver.stream_context: "cuStreamGetCtx",
    Driver.current_context: "cuCtxGetCurrent",
    Driver.push_context: "cuCtxPushCurrent",
    Driver.pop_context: "cuCtxPopCurrent",
}


def _header() -> str:
    """The text of cuda.h from the installed package of CUDA's headers."""
    for name in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            for path in metadata.files(name) or ():
                if path.name == "cuda.h":
                    return Path(path.locate()).read_text()
    pytest.skip("the headers of CUDA are not installed")


def test_functions_are_those_that_a_compiler_would_call() -> None:
    """The header gives some names a later version of the function."""
    versions = dict(re.findall(r"^ *#define +(cu\w+) +(cu\w+_v\d+)$", _header(), re.MULTILINE))
    assert versions["cuMemAlloc"] == "cuMemAlloc_v2"
    for function, name in _MEANT.items():
        assert driver._NAMES[function] == versions.get(name, name)


class _Cuda:
    """The driver's library and CuPy's runtime on one thread, with a record of the calls."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.status, self.context = 0, 0

    @contextlib.contextmanager
    def device(self, number: int) -> Iterator[None]:
        self.asked.append(("device", number))
        yield
        self.asked.append("left")

    def free(self, address: int) -> None:
        self.asked.append(("free", address))
        self.context = 5 << 40

    def cuCtxGetCurrent(self, found: Any) -> int:  # noqa: N802
        ctypes.cast(found, ctypes.POINTER(ctypes.c_uint64))[0] = self.context
        return self.status


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> _Cuda:
    made = _Cuda()
    stream = SimpleNamespace(synchronize=lambda: made.asked.append("waited"))
    monkeypatch.setattr(driver, "_library", lambda: made)
    for owner, name, value in (
        (cupy.cuda, "Device", made.device),
        (cupy.cuda.runtime, "free", made.free),
        (cupy.cuda, "get_current_stream", lambda: stream),
        (cupy, "zeros", lambda count, dtype: made.asked.append((count, dtype)) or "counter"),
    ):
        monkeypatch.setattr(owner, name, value)
    return made


def test_a_context_is_made_and_is_that_of_the_device(cuda: _Cuda) -> None:
    assert driver.context_of(3) == 5 << 40
    assert cuda.asked == [("device", 3), ("free", 0), "left"]


@pytest.mark.parametrize("status", [0, 201])
def test_a_device_without_a_context_is_an_error(
    cuda: _Cuda, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cupy.cuda.runtime, "free", lambda address: None)
    cuda.status = status
    with pytest.raises(OSError, match=f"device 3 has no context: CUDA error {status}"):
        driver.context_of(3)


def test_a_counter_is_0_before_any_stream_draws_from_it(cuda: _Cuda) -> None:
    assert driver.new_counter(3) == "counter"
    assert cuda.asked == [("device", 3), (1, cupy.int32), "waited", "left"]


def test_a_driver_without_a_function_is_an_error(cuda: _Cuda) -> None:
    with pytest.raises(AttributeError, match="cuLaunchKernelEx"):
        driver.driver_functions.__wrapped__()

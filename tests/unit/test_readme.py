"""The explanations and errors in the guide match the library's."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import calls, pipeline
from cuflash.arrays import adopt
from cuflash.cuda import available
from cuflash.cuda import compile as compiling

from ..architectures import LIMITS
from .documents import read
from .fake_device import FakeDevice, fake_device

__all__ = ["fake_device"]

ALGORITHMS = read("docs/guide/algorithms.md")
CACHES = read("docs/guide/caches.md")
TROUBLESHOOTING = read("docs/guide/troubleshooting.md")


@pytest.fixture(autouse=True)
def _no_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the pages show holds for calls that leave the backend to cuflash."""
    monkeypatch.delenv("CUFLASH_BACKEND", raising=False)


def _explained() -> dict[str, tuple[str, str]]:
    """Code and its output, for every explanation."""
    pattern = r"```python\n((?:(?!```).)*)```\n\n<!-- explain: (\w+) -->\n```\n(.*?)```"
    found = re.findall(pattern, ALGORITHMS + CACHES, re.DOTALL)
    return {name: (code, text) for code, name, text in found}


@pytest.mark.parametrize("name", ["causal", "backward", "unaligned", "kvcache"])
def test_explanations_are_those_of_an_h200(
    fake_device: FakeDevice,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    monkeypatch.setitem(LIMITS, "90", replace(LIMITS["90"], name="NVIDIA H200"))
    code, text = _explained()[name]
    exec(code, {"cuflash": cuflash})
    assert capsys.readouterr().out == text


def test_every_explanation_is_held_to_that() -> None:
    assert set(_explained()) == {"causal", "backward", "unaligned", "kvcache"}
    assert (ALGORITHMS + CACHES).count("<!-- explain:") == 4


def _messages() -> list[str]:
    """First column of the table of errors."""
    head = "| message | why | what helps |\n|---|---|---|\n"
    table = TROUBLESHOOTING.split(head)[1].split("\n\n")[0]
    return [line.split("`")[1] for line in table.splitlines()]


def _pattern(message: str) -> str:
    """A pattern for a message in which dots replace variable parts."""
    return ".+".join(re.escape(part) for part in message.split("\N{HORIZONTAL ELLIPSIS}"))


def _raised(call: Callable[[], Any]) -> str:
    with pytest.raises(cuflash.CuflashError) as caught:
        call()
    return str(caught.value)


def _attend(shape: tuple[int, ...] = (4, 8), dtype: Any = np.float32, **options: Any) -> str:
    q = np.ones(shape, dtype)
    return _raised(lambda: cuflash.attention(q, q, q, **options))


def _unavailable(patch: pytest.MonkeyPatch, error: Exception) -> str:
    """The message if importing CuPy, or asking CuPy for its devices, raises this error."""
    import cupy

    available._why_not.cache_clear()
    if isinstance(error, cupy.cuda.runtime.CUDARuntimeError):

        def count() -> int:
            raise error

        patch.setattr(cupy.cuda.runtime, "getDeviceCount", count)
    else:
        _without_cupy(patch, error)
    said = _raised(available.require_device)
    available._why_not.cache_clear()
    return said


def _without_cupy(patch: pytest.MonkeyPatch, error: Exception) -> None:
    real = __import__

    def importing(name: str, *others: Any) -> Any:
        if name == "cupy":
            raise error
        return real(name, *others)

    patch.setattr("builtins.__import__", importing)


_NOT_FOUND = ModuleNotFoundError("No module named 'cupy'", name="cupy")


def _no_driver(patch: pytest.MonkeyPatch) -> str:
    import cupy

    return _unavailable(patch, cupy.cuda.runtime.CUDARuntimeError(35))


class _Foreign:
    """Another library's array on the device."""

    __cuda_array_interface__ = {  # noqa: RUF012  (the protocol's name)
        "shape": (4, 8),
        "typestr": "<f4",
        "data": (1 << 20, False),
        "version": 3,
    }


def _foreign_without_cupy(patch: pytest.MonkeyPatch) -> str:
    available._why_not.cache_clear()
    _without_cupy(patch, _NOT_FOUND)
    said = _raised(lambda: adopt.adopt("q", _Foreign()))
    available._why_not.cache_clear()
    return said


def _no_nvrtc(patch: pytest.MonkeyPatch) -> str:
    import cupy

    def version() -> None:
        raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    patch.setattr(cupy.cuda.nvrtc, "getVersion", version)
    compiling.require_toolchain.cache_clear()
    said = _raised(compiling.require_toolchain)
    compiling.require_toolchain.cache_clear()
    return said


def _no_header(patch: pytest.MonkeyPatch) -> str:
    log = 'kern.cu(3): catastrophic error: cannot open source file "cuda_fp16.h"'
    return str(compiling._compile_error(None, log))  # type: ignore[arg-type]


def _on_hopper(patch: pytest.MonkeyPatch, **limits: Any) -> None:
    found = replace(LIMITS["90"], **limits)
    patch.setattr(pipeline.DeviceLimits, "query", lambda device_id: found)
    patch.setattr(pipeline, "is_usable", lambda: True)
    for name, answer in (("require_device", 0), ("require_toolchain", None)):
        patch.setattr(pipeline, name, lambda answer=answer: answer)
    calls.forget()


def _explain(dtype: str, **options: Any) -> None:
    x = (1, 8, 1, 64)
    try:
        cuflash.explain(x, x, x, dtype=dtype, **options)
    finally:
        calls.forget()  # these plans are for a device that does not exist


def _old_nvrtc(patch: pytest.MonkeyPatch) -> str:
    _on_hopper(patch, nvrtc=(12, 8))
    with pytest.warns(UserWarning, match="NVRTC") as told:
        _explain("float16")
    return str(told[0].message)


def _named(patch: pytest.MonkeyPatch) -> str:
    _on_hopper(patch)
    return _raised(lambda: _explain("float32", algorithm="fa3"))


def _heads(patch: pytest.MonkeyPatch) -> str:
    q, k = np.ones((2, 8, 4, 16), np.float32), np.ones((2, 8, 3, 16), np.float32)
    return _raised(lambda: cuflash.attention(q, k, k))


def _traced(patch: pytest.MonkeyPatch) -> str:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    x = jax.numpy.ones((4, 8))
    return _raised(lambda: jax.jit(lambda x: cuflash.attention(x, x, x))(x))


#: Calls that provoke the messages, in the order of the table.
PROVOKED: tuple[Callable[[pytest.MonkeyPatch], str], ...] = (
    lambda patch: _unavailable(patch, _NOT_FOUND),
    _no_driver,
    lambda patch: _unavailable(patch, PermissionError(13, "Permission denied")),
    _foreign_without_cupy,
    _no_nvrtc,
    _no_header,
    _old_nvrtc,
    lambda patch: _attend(dtype=np.int8),
    lambda patch: _attend(block_mask=np.ones((1, 1), bool)),
    lambda patch: _attend(mask=np.ones((4, 4), np.int8)),
    lambda patch: _attend(dropout_p=0.1),
    _named,
    lambda patch: _attend(algorithm="fa3", backend="numpy"),
    lambda patch: _attend(score_mod=cuflash.ScoreMod("return 0.5 * s;"), backend="numpy"),
    _heads,
    _traced,
    lambda patch: compiling._NO_CACHE,
)


@pytest.mark.parametrize("row", range(len(PROVOKED)))
def test_a_message_is_what_the_library_says(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    with monkeypatch.context() as patch:
        said = PROVOKED[row](patch)
    assert re.fullmatch(_pattern(_messages()[row]), said), said


def test_every_message_is_held_to_that() -> None:
    assert len(_messages()) == len(PROVOKED)

"""Repeated calls: destinations, streams, graph captures, and the memory that is kept."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import calls, dispatch
from cuflash.cuda import current

from ..emulator.host_cupy import host_cupy
from .call_case import ROWS, SHAPE, Decided, decided, qkv
from .fake_device import ADDRESS, FakeDevice, device_array, fake_device
from .told_calls import no_kernel

__all__ = ["decided", "fake_device"]

#: Gradients of FlashAttention-3 take only the tiles that fit all lengths.
pytestmark = pytest.mark.usefixtures("any_lengths")


def _out(number: int = 0) -> Any:
    return device_array(SHAPE, address=ADDRESS * (500 + number))


def _workspace(number: int = 0, size: int = 1 << 18) -> Any:
    return device_array((size,), np.uint8, ADDRESS * (900 + number))


def test_destinations_are_looked_at_once(fake_device: FakeDevice, decided: Decided) -> None:
    lse = device_array(ROWS, np.float32, ADDRESS * 800)
    for number in (0, 1, 0, 1, 1, 0):
        out = _out(number)
        given = {**qkv(number), "out": out, "lse_out": lse, "workspace": _workspace()}
        assert cuflash.attention(**given) is out
        assert int(fake_device.launched[-1]["out"]["data"]) == out.data.ptr
        assert int(fake_device.launched[-1]["lse"]["data"]) == lse.data.ptr
    both = cuflash.attention(**given, return_lse=True)
    assert both[0] is out
    assert both[1] is lse
    assert decided.count == 3


def test_gradients_are_looked_at_once(fake_device: FakeDevice, decided: Decided) -> None:
    grads = tuple(_out(number) for number in range(3))
    lse = device_array(ROWS, np.float32, ADDRESS * 800)
    given = {**qkv(), "dout": _out(4), "out": _out(5), "lse": lse, "grads": grads}
    for _ in range(2):
        made = cuflash.attention_backward(**given, workspace=_workspace(size=1 << 24))
        assert all(mine is theirs for mine, theirs in zip(made, grads, strict=True))
        _, main, convert = fake_device.launched[-3:]
        assert [int(main[name]["data"]) for name in ("dk", "dv")] == [g.data.ptr for g in grads[1:]]
        assert int(convert["dq"]["data"]) == grads[0].data.ptr
        assert int(main["row_lse"]) >= ADDRESS * 900
    assert decided.count == 1


@pytest.mark.parametrize("over", ["q", "workspace"])
def test_the_same_kind_elsewhere_may_overlap(
    fake_device: FakeDevice, decided: Decided, over: str
) -> None:
    """An output over an input or the workspace is refused, even after valid repeated calls."""
    given = {**qkv(), "out": _out(), "workspace": _workspace()}
    for _ in range(2):
        cuflash.attention(**given)
    for _ in range(2):
        with pytest.raises(cuflash.ArgumentValueError, match="memory"):
            cuflash.attention(**{**given, "out": device_array(SHAPE, address=given[over].data.ptr)})
    assert len(fake_device.launched) == 2


@pytest.mark.parametrize(
    "fault",
    [lambda: _workspace(size=3), lambda: _workspace()[1:], lambda: _workspace().view("f4")],
)
def test_another_workspace_is_looked_at(
    fake_device: FakeDevice, decided: Decided, fault: Any
) -> None:
    for workspace in (_workspace(), _workspace(1)):
        cuflash.attention(**qkv(), workspace=workspace)
    with pytest.raises(cuflash.CuflashError, match="workspace: got"):
        cuflash.attention(**qkv(), workspace=fault())
    assert decided.count == 3


def test_addresses_that_are_apart_are_so_many_and_no_more(
    fake_device: FakeDevice, decided: Decided, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_APART", 8)
    for number in range(30):
        cuflash.attention(**qkv(), out=_out(number))
        (ready,) = calls._ready.values()
        assert 0 < len(ready._apart or {}) <= 8
    cuflash.attention(**qkv(), out=_out(29))
    assert decided.count == 30


def test_every_call_is_on_the_stream_of_its_time(fake_device: FakeDevice, decided: Decided) -> None:
    for stream in (0, 77, 78, 2, 0):
        fake_device.streams[0] = stream
        cuflash.attention(**qkv())
    assert [stream for _, stream in fake_device.queued] == [0, 77, 78, 2, 0]
    assert decided.count == 1


def test_a_capture_keeps_what_a_repeated_call_makes(
    fake_device: FakeDevice, decided: Decided, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph runs long after the call, so no other call may get the memory of its arrays."""
    kept: list[Any] = []
    monkeypatch.setattr(dispatch, "_kept_for_graphs", kept)
    fake_device.streams[0] = 77
    for capturing in (False, False, True, True, False):
        fake_device.capturing.clear()
        fake_device.capturing |= {77} if capturing else set()
        cuflash.attention(**qkv())
    assert [array.nbytes for array in kept] == [4, 4]
    assert decided.count == 3


def test_a_capture_of_a_repeated_call_with_all_its_memory_keeps_nothing(
    fake_device: FakeDevice, decided: Decided, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(dispatch, "_kept_for_graphs", kept)
    fake_device.streams[0] = 77
    for _ in range(3):
        cuflash.attention(**qkv(), out=_out(), workspace=_workspace())
        fake_device.capturing.add(77)
    assert not kept
    assert decided.count == 1


@pytest.mark.in_turns(by="algorithm", days=3)
@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
def test_ten_thousand_calls_do_not_grow(
    fake_device: FakeDevice, decided: Decided, algorithm: Any
) -> None:
    """Every call has results at new addresses, but the memory in use does not grow."""

    def call(count: int) -> None:
        for number in range(count):
            cuflash.attention(**qkv(number % 16), algorithm=algorithm)
        fake_device.launched.clear()
        fake_device.queued.clear()

    call(1000)  # afterwards nothing that is kept may grow
    gc.collect()
    tracemalloc.start()
    try:
        call(1000)
        before = tracemalloc.get_traced_memory()[0]
        call(10_000)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < before + 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("wrt", [("q", "k", "v"), ("k",)])
def test_a_repeated_call_holds_its_whole_workspace_while_it_launches(
    wrt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulator refuses launches with memory that is too small, or was given back."""

    def refuse(*given: Any, **keywords: Any) -> Any:
        raise AssertionError("decided again")

    with host_cupy(make=no_kernel) as host:
        zeros = np.zeros((1, 128, 2, 64), np.float16)
        given = {name: host.array(zeros) for name in ("dout", "q", "k", "v", "out")}
        given["lse"] = host.array(np.zeros((1, 2, 128), np.float32))
        host.call(cuflash.attention_backward, **given, wrt=wrt)
        monkeypatch.setattr(dispatch, "run", refuse)
        host.call(cuflash.attention_backward, **given, wrt=wrt)
        assert any("workspace" in names for names in host.auditor.used.values())


def test_a_thread_is_given_the_context_of_a_device_once(fake_device: FakeDevice) -> None:
    assert current.is_current(0)
    assert current.is_current(0)
    assert not current.is_current(1)
    fake_device.current = 1
    assert current.is_current(1)
    assert fake_device.contexts == [0, 1]


def test_the_null_stream_is_where_cupy_takes_it_to_be(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuPy's null stream is the legacy stream, or the per-thread one if a variable asks for it."""
    streams = pytest.importorskip("cupy_backends.cuda.stream")
    for default, expected in ((1, 0), (2, 2)):
        monkeypatch.setattr(streams, "get_default_stream_ptr", lambda default=default: default)
        current._default_stream.cache_clear()
        assert current.current_stream(0) == expected
    current._default_stream.cache_clear()
    fake_device.streams[1] = 77
    assert current.current_stream(1) == 77

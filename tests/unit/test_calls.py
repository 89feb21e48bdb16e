"""The call cache: calls of one signature share one decision, and other calls do not."""

from __future__ import annotations

import threading
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

import cuflash
from cuflash import calls, dispatch, pipeline
from cuflash.planning.plan import Plan

from .call_case import ROWS, SHAPE, Decided, decided, qkv
from .fake_device import ADDRESS, FakeDevice, device_array, fake_device

__all__ = ["decided", "fake_device"]

#: Gradients of FlashAttention-3 take only the tiles that fit all lengths.
pytestmark = pytest.mark.usefixtures("any_lengths")


def _of_backward(number: int = 0, **changed: Any) -> dict[str, Any]:
    more = {name: device_array(SHAPE, address=ADDRESS * (100 + number)) for name in ("dout", "out")}
    lse = device_array(ROWS, np.float32, ADDRESS * 1000)
    return qkv(number) | more | {"lse": lse} | changed


def _data(structure: Any, *names: str) -> list[int]:
    return [int(structure[name]["data"]) for name in names]


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
def test_the_second_call_of_a_kind_is_not_decided(
    fake_device: FakeDevice, decided: Decided, algorithm: Any
) -> None:
    for number in (0, 0, 1, 2, 1):  # other addresses need no decision
        given = qkv(number)
        out, lse = cuflash.attention(**given, return_lse=True, algorithm=algorithm)
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == (SHAPE, "f2", ROWS, "f4")
        launched = fake_device.launched[-1]
        assert _data(launched, "out", "lse") == [out.data.ptr, lse.data.ptr]
        if algorithm == "fa3":
            maps = [int(launched[f"{name}_map"]["opaque"][0]) for name in "qkv"]
        else:
            maps = _data(launched, *"qkv")
        assert maps == [given[name].data.ptr for name in "qkv"]
    assert decided.count == 1
    assert len(fake_device.launched) == 5


@pytest.mark.parametrize("with_dlse", [False, True])
def test_the_second_backward_pass_is_not_decided(
    fake_device: FakeDevice, decided: Decided, with_dlse: bool
) -> None:
    more = {"dlse": device_array(ROWS, np.float32, ADDRESS * 2000)} if with_dlse else {}
    for number in (0, 1):
        given = _of_backward(number, **more)
        grads = cuflash.attention_backward(**given)
        statistics, main, convert = fake_device.launched[-3:]
        assert _data(main, "dk", "dv") == [array.data.ptr for array in grads[1:]]
        assert _data(convert, "dq") == [grads[0].data.ptr]
        assert _data(statistics, "lse", "dlse") == [
            ADDRESS * 1000,
            ADDRESS * 2000 if with_dlse else 0,
        ]
        assert _data(statistics, "out", "dout") == [given["out"].data.ptr] * 2
        workspace, nbytes = fake_device.allocated[-1]
        assert workspace.ptr <= int(main["row_lse"]) < workspace.ptr + nbytes
        assert [int(main[f"{name}_map"]["opaque"][0]) for name in ("q", "k", "v", "dout")] == [
            given[name].data.ptr for name in ("q", "k", "v", "dout")
        ]
    assert decided.count == 1


def _strided(shape: tuple[int, ...], address: int) -> Any:
    return device_array((*shape[:-1], 2 * shape[-1]), address=address)[..., : shape[-1]]


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stride": ({"k": lambda: _strided(SHAPE, ADDRESS * 2)}, {}),
    "alignment": ({"k": lambda: device_array(SHAPE, address=ADDRESS * 2 + 8)}, {}),
    "length": ({n: lambda: device_array((2, 90, 4, 64)) for n in "kv"}, {}),
    "dtype": ({n: lambda: device_array(SHAPE, bfloat16) for n in "qkv"}, {}),
    "causal": ({}, {"causal": True}),
    "scale": ({}, {"scale": 0.25}),
    "offset": ({}, {"causal": True, "q_offset": 3}),
    "layout": ({}, {"layout": "bhsd"}),
    "output": ({}, {"out_dtype": "float32"}),
    "lse": ({}, {"return_lse": True}),
    "algorithm": ({}, {"algorithm": "fa2"}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_kind_is_another_call(fake_device: FakeDevice, decided: Decided, name: str) -> None:
    arrays, options = OTHERS[name]
    plans: list[Plan] = []
    other = {n: make() for n, make in arrays.items()}
    with dispatch.observe(plans.append):
        for _ in range(2):
            cuflash.attention(**qkv())
            cuflash.attention(**qkv(**other), **options)
    assert decided.count == 2
    assert plans[:2] == plans[2:]  # observers get the plans of cached calls too
    assert plans[0] != plans[1] or name in ("lse", "stride")
    assert len(fake_device.launched) == 4


def test_another_device_is_another_call(fake_device: FakeDevice, decided: Decided) -> None:
    import cupy

    def there(address: int) -> Any:
        memory = cupy.cuda.UnownedMemory(address, 1 << 30, None, 1)
        return cupy.ndarray(SHAPE, np.float16, cupy.cuda.MemoryPointer(memory, 0))

    fake_device.streams[1] = 77
    other = {name: there(ADDRESS * (i + 1)) for i, name in enumerate("qkv")}
    for _ in range(2):
        cuflash.attention(**qkv())
        cuflash.attention(**other)
    assert decided.count == 2
    assert fake_device.queued == [(0, 0), (1, 77)] * 2
    assert fake_device.current == 0


WRONG = {
    "causal": (True, [1, 1.0, "True"]),
    "return_lse": (False, [0, 0.0, None]),
    "scale": (1.0, [True, "1.0", np.True_, [1.0]]),
    "q_offset": (1, [True, 1.0, {}]),
    "algorithm": ("fa2", ["FA2", ["fa2"], 2]),
    "blocks": ((64, 64), [(64.0, 64), (64, True), 64]),
    "out_dtype": ("float16", ["int8", [], np.zeros(2)]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_only_looks_the_same_is_refused(
    fake_device: FakeDevice, decided: Decided, name: str
) -> None:
    right, wrong = WRONG[name]
    for _ in range(2):
        cuflash.attention(**qkv(), **{name: right})
    launched = len(fake_device.launched)
    for value in wrong:
        with pytest.raises(cuflash.CuflashError, match=f"{name}: got"):
            cuflash.attention(**qkv(), **{name: value})
    assert len(fake_device.launched) == launched == 2


class Moody(float):
    """A number whose hash raises an error."""

    def __hash__(self) -> int:
        raise ValueError("not today")


class Half(np.float64):
    """A subclass of a NumPy number: an equal instance may mean another thing."""


@pytest.mark.parametrize("scale", [Fraction(1, 2), np.float32(0.5), Moody(0.5), Half(0.5)])
def test_odd_keywords_are_taken_as_they_are(
    fake_device: FakeDevice, decided: Decided, scale: Any
) -> None:
    for _ in range(2):
        cuflash.attention(**qkv(), scale=scale)
    assert [float(one["scale"].view(np.float64)) for one in fake_device.launched] == [0.5, 0.5]
    assert decided.count == (1 if isinstance(scale, np.float32) else 2)


def test_a_class_with_a_dtype_is_asked_every_time(
    fake_device: FakeDevice, decided: Decided
) -> None:
    class Changing:
        dtype = np.dtype("float32")

    assert cuflash.attention(**qkv(), out_dtype=Changing).dtype == np.float32
    Changing.dtype = np.dtype("float16")
    assert cuflash.attention(**qkv(), out_dtype=Changing).dtype == np.float16


def test_who_observes_is_told_before_the_launch(fake_device: FakeDevice, decided: Decided) -> None:
    def refuse(plan: Any) -> None:
        raise RuntimeError("not this one")

    for launched in (0, 1):
        with dispatch.observe(refuse), pytest.raises(RuntimeError, match="not this one"):
            cuflash.attention(**qkv())
        assert len(fake_device.launched) == launched
        cuflash.attention(**qkv())


def test_a_call_that_copies_or_does_nothing_is_always_decided(
    fake_device: FakeDevice, decided: Decided, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_copy", lambda array, *_: device_array(array.shape))
    wide = device_array((2, 100, 4, 128))
    nothing = device_array(SHAPE)[:, :0]
    for _ in range(2):
        cuflash.attention(**qkv(k=wide[..., ::2]))
        cuflash.attention(**qkv(q=nothing))
    assert decided.count == 4
    assert len(fake_device.launched) == 2


def test_a_subclass_is_not_plainly_an_array(fake_device: FakeDevice, decided: Decided) -> None:
    import cupy

    class Mine(cupy.ndarray):  # type: ignore[misc]
        pass

    for _ in range(2):
        cuflash.attention(**qkv(k=qkv()["k"].view(type=Mine)))
    assert decided.count == 2


def test_so_many_kinds_are_kept_and_no_more(
    fake_device: FakeDevice, decided: Decided, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls._ready, "most", 8)
    for number in range(30):
        cuflash.attention(**qkv(), scale=1.0 + number)
        assert 0 < len(calls._ready) <= 8
    cuflash.attention(**qkv(), scale=30.0)
    assert decided.count == 30


def test_forgetting_decides_anew(fake_device: FakeDevice, decided: Decided) -> None:
    for _ in range(2):
        cuflash.attention(**qkv())
        calls.forget()
    assert decided.count == 2
    assert pipeline._decide.cache_info().currsize == 0


def test_threads_share_what_was_decided(fake_device: FakeDevice, decided: Decided) -> None:
    """Every thread launches with its own addresses; its first call gives it a device context."""
    cuflash.attention(**qkv())
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait()
        for _ in range(50):
            cuflash.attention(**qkv(number))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert decided.count == 1
    assert fake_device.contexts == [0] * 9
    at = [int(one["q_map"]["opaque"][0]) for one in fake_device.launched[1:]]
    assert sorted(at) == sorted([qkv(n)["q"].data.ptr for n in range(8)] * 50)

"""Objects that only look like arrays, and device arrays without a device."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash
from cuflash.arrays import adopt as adopting
from cuflash.arrays.adopt import adopt
from cuflash.cuda import available

from .foreign import Tensor

SHAPE = (1, 5, 2, 4)


class SurpriseError(Exception):
    """An exception of another library."""


_RAISED = st.sampled_from(
    [
        SurpriseError,
        KeyError,
        AttributeError,
        AssertionError,
        NotImplementedError,
        OSError,
        StopIteration,
    ]
)
_RETURNED = st.sampled_from(
    [None, (), (1,), (1, 0), ("cpu", 0), (2, 0), 7, "text", {}, [], object()]
)


@st.composite
def _pretenders(draw: st.DrawFn) -> Any:
    """An object with some of the protocols' members; each raises an error or returns a value."""

    def member() -> Any:
        raised = draw(_RAISED | st.none())
        returned = draw(_RETURNED)

        def behave(self: Any, *_: Any, **__: Any) -> Any:
            if raised is not None:
                raise raised("of its own")
            return returned

        return property(behave) if draw(st.booleans()) else behave

    names = ["__dlpack__", "__dlpack_device__", "__array_namespace__", "__cuda_array_interface__"]
    names += ["is_neg", "is_deleted", "unit", "units", "__array__", "dtype", "shape", "__len__"]
    chosen = draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
    if draw(st.booleans()):
        chosen = [*{*chosen, "__dlpack__", "__dlpack_device__"}]
    return type("Pretender", (), {name: member() for name in sorted(chosen)})()


@given(_pretenders(), st.sampled_from(["q", "k", "v", "out"]))
def test_whatever_pretends_to_be_an_array_is_refused_by_name(pretender: Any, name: str) -> None:
    x = np.ones(SHAPE, np.float32)
    arrays = {"q": x, "k": x, "v": x, name: pretender}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(cuflash.CuflashError, match=f"^{name}( is in CUDA memory|: got )"):
            cuflash.attention(**arrays, backend="numpy")


@given(
    st.dictionaries(
        st.sampled_from(["typestr", "shape", "data", "version", "strides", "mask"]),
        st.sampled_from([None, "<f4", ">f4", "", "<V2", 4, (1, 5, 2, 4), (4096, False), "x", ()]),
    )
    | _RETURNED
)
def test_any_cuda_array_interface_is_taken_or_refused_by_name(described: Any) -> None:
    x = np.ones(SHAPE, np.float32)
    k = SimpleNamespace(__cuda_array_interface__=described)
    with pytest.raises(cuflash.CuflashError, match=r"^k( is in CUDA memory|: got )"):
        cuflash.attention(x, k, x, backend="numpy")


class OnDevice(Tensor):
    """An array that says it is in CUDA memory."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def test_a_device_array_beside_no_driver_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    reason = "the CUDA driver has no usable device (too old)"
    monkeypatch.setattr(available, "_why_not", lambda: reason)
    interface = {"typestr": "<f4", "shape": SHAPE, "data": (4096, False), "version": 3}
    by_interface = SimpleNamespace(__cuda_array_interface__=interface)

    for value in (by_interface, OnDevice(np.ones(SHAPE, np.float32))):
        with pytest.raises(cuflash.BackendUnavailableError) as caught:
            cuflash.attention(value, value, value)
        assert str(caught.value) == f"q is in CUDA memory, which cannot be used: {reason}"
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(4096, 4096, None, 0), 0)
    native = cupy.ndarray(SHAPE, np.float32, memory)
    with pytest.raises(cuflash.BackendUnavailableError, match="too old"):
        cuflash.attention(native, native, native)


def test_a_device_array_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

    def at(place: int, *shape: int) -> Any:
        memory = cupy.cuda.UnownedMemory(place, 4096, None, 0)
        return cupy.ndarray(shape, np.float32, cupy.cuda.MemoryPointer(memory, 0))

    for native, fine in ((at(0, *SHAPE), False), (at(4096, *SHAPE), True), (at(0, 0, 4), True)):
        fake = SimpleNamespace(from_dlpack=lambda value, native=native: native)
        monkeypatch.setattr(adopting, "require_cupy", lambda what, fake=fake: fake)
        if fine:
            assert adopt("q", OnDevice(np.ones(SHAPE))).native is native
        else:
            with pytest.raises(cuflash.ArgumentTypeError, match=r"q: got .*without memory"):
                adopt("q", OnDevice(np.ones(SHAPE)))


def test_a_device_array_of_a_foreign_byte_order_or_class(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(4096, 4096, None, 0), 0)
    with pytest.raises(cuflash.ArgumentTypeError, match="q: got dtype '>f4'"):
        adopt("q", cupy.ndarray(SHAPE, ">f4", memory))
    mine = cupy.ndarray(SHAPE, np.float32, memory).view(type=type("Mine", (cupy.ndarray,), {}))
    adopted = adopt("q", mine)
    assert type(adopted.native) is cupy.ndarray
    assert adopted.native.data.ptr == 4096
    assert adopted.given is mine

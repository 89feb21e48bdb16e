"""Launches of kernels that may begin before the kernel before them has ended."""

from __future__ import annotations

import ctypes
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.cuda import launch, overlap
from cuflash.cuda.prepared_kernel import PreparedKernel

from ..kit.native_frame import LaunchConfig
from .fake_device import ADDRESS, FakeDevice, fake_device

__all__ = ["fake_device"]


def _address(reference: Any) -> int:
    """The address that C gets for a reference."""
    return ctypes.addressof(reference._obj)


class FakeFunction:
    """cuLaunchKernelEx, which notes its arguments and returns an error."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.given: list[tuple[Any, ...]] = []

    def __call__(self, config: Any, function: Any, parameters: Any, extra: Any) -> int:
        one = LaunchConfig.from_address(_address(config))
        grid, block = (one.x, one.y, one.z), (one.threads, one.ty, one.tz)
        attribute = (ctypes.c_int64 * 2).from_address(one.attributes)
        where, stream = (function.value, parameters.value, extra), one.stream or 0
        self.given.append((grid, block, one.shared, stream, one.count, [*attribute], where))
        return self.error


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    overlap.overlapping_launch.cache_clear()
    yield
    overlap.overlapping_launch.cache_clear()


def _driver(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    library = SimpleNamespace(cuLaunchKernelEx=function)
    monkeypatch.setattr(overlap.ctypes, "CDLL", lambda name: library)


def test_the_driver_is_given_the_launch_and_the_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    function = FakeFunction(7)
    _driver(monkeypatch, function)
    launch_early = overlap.overlapping_launch()
    assert launch_early is not None
    launch_it = launch_early(11, (5, 1, 1, 64, 1, 1, 4096), 1 << 40, 13)
    assert not function.given
    assert [launch_it(), launch_it()] == [7, 7]
    sizes = (5, 1, 1), (64, 1, 1), 4096
    assert function.given == [(*sizes, 1 << 40, 1, [6, 1], (11, 13, None))] * 2


def test_addresses_have_all_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """ctypes passes a plain number as 32 bits."""
    function = FakeFunction()
    _driver(monkeypatch, function)
    launch_early = overlap.overlapping_launch()
    assert launch_early is not None
    launch_early((1 << 47) + 3, (5, 1, 1, 64, 1, 1, 4096), (1 << 47) + 1, (1 << 47) + 2)()
    ((*_, stream, _, _, where),) = function.given
    assert (stream, *where) == ((1 << 47) + 1, (1 << 47) + 3, (1 << 47) + 2, None)


def test_every_launch_has_its_own_size_and_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also launches that repeat an earlier one, and those after the kept ones are forgotten."""
    monkeypatch.setattr(overlap, "_KEPT", 2)
    function = FakeFunction()
    _driver(monkeypatch, function)
    launch_early = overlap.overlapping_launch()
    assert launch_early is not None
    sizes = [((n, 1, 1), (32 * m, 1, 1), k) for n in (1, 2) for m in (1, 2) for k in (0, 64)]
    asked = [(*size, stream) for size in sizes for stream in (0, 1 << 40) for _ in range(2)] * 2
    made = [
        launch_early(number, (*grid, *block, shared), stream, 2 * number)
        for number, (grid, block, shared, stream) in enumerate(asked, 1)
    ]
    assert [launch_it() for launch_it in made] == [0] * len(made)
    assert function.given == [
        (*one, 1, [6, 1], (number, 2 * number, None)) for number, one in enumerate(asked, 1)
    ]


def test_a_launch_keeps_its_size_as_long_as_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []

    class Recorded(overlap._Config):
        def __init__(self, *values: Any) -> None:
            super().__init__(*values)
            made.append(weakref.ref(self))

    def living() -> list[bool]:
        gc.collect()
        return [reference() is not None for reference in made]

    monkeypatch.setattr(overlap, "_KEPT", 1)
    monkeypatch.setattr(overlap, "_Config", Recorded)
    _driver(monkeypatch, FakeFunction())
    launch_early = overlap.overlapping_launch()
    assert launch_early is not None
    first = launch_early(1, (1, 1, 1, 32, 1, 1, 0), 0, 2)
    launch_early(1, (1, 1, 1, 32, 1, 1, 0), 0, 3)
    assert living() == [True]  # both have this one
    launch_early(1, (2, 1, 1, 32, 1, 1, 0), 0, 2)
    assert living() == [True, True]
    assert first() == 0
    del first
    assert living() == [False, True]


def test_an_old_driver_or_none_launches_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(overlap.ctypes, "CDLL", missing)
    assert overlap.overlapping_launch() is None
    overlap.overlapping_launch.cache_clear()
    monkeypatch.setattr(overlap.ctypes, "CDLL", lambda name: SimpleNamespace())
    assert overlap.overlapping_launch() is None


def _split() -> launch.PreparedPlan:
    """A pass of one query in chunks, on a fake device."""
    q, kv = (1, 1, 8, 64), (1, 256, 2, 64)
    made = cuflash.prepare(q, kv, kv, dtype=np.float16, kv_chunk=64, layout="bshd")
    plan = made._planned.launcher  # type: ignore[union-attr]
    assert [one.overlaps for one in plan.launches] == [False, True]
    return plan  # type: ignore[return-value]


def _run(plan: launch.PreparedPlan, stream: int = 0) -> None:
    plan.run(tuple(ADDRESS for _ in plan.names), ADDRESS, stream)


Made = Callable[[int, tuple[int, ...], int, int], Callable[[], int]]


def _overlapping(launched: Callable[..., int]) -> Callable[[], Made]:
    """Replaces ``overlapping_launch``; launches call a function with their arguments."""
    return lambda: lambda *given: functools.partial(launched, *given)


def test_only_the_merge_overlaps(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    early: list[tuple[int, ...]] = []

    def launched(handle: int, shape: tuple[int, ...], stream: int, parameters: int) -> int:
        early.append((handle, *shape, stream))
        return 0

    monkeypatch.setattr(launch, "overlapping_launch", _overlapping(launched))
    plan = _split()
    merge = plan.launches[1]
    for stream in (0, 77, 77):
        _run(plan, stream)
    assert early == [(merge.handle, *merge.shape, stream) for stream in (0, 77, 77)]
    assert [stream for _, stream in fake_device.queued] == [0, 77, 77]


def test_parameters_live_while_a_kernel_is_launched(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver works without Python's lock: meanwhile other threads empty what is kept."""
    made: list[weakref.ref[Any]] = []
    make = PreparedKernel.parameters

    def recorded(*given: Any) -> Any:
        parameters = make(*given)
        made.append(weakref.ref(parameters.words))
        return parameters

    def launched(handle: int, shape: tuple[int, ...], stream: int, parameters: int) -> int:
        plan._kept.clear()
        gc.collect()
        words = made[-1]()
        assert words is not None
        assert parameters == words.ctypes.data + words.nbytes - 8
        return 0

    monkeypatch.setattr(PreparedKernel, "parameters", recorded)
    monkeypatch.setattr(launch, "overlapping_launch", _overlapping(launched))
    plan = _split()
    for _ in range(3):
        _run(plan)
    gc.collect()
    assert [words() for words in made] == [None] * 6


def test_a_refused_launch_names_the_plan(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "overlapping_launch", _overlapping(lambda *given: 719))
    for _ in range(2):
        with pytest.raises(cuflash.LaunchError, match=r"fa2 on cuda.*refused: CUDA error 719"):
            _run(_split())


def test_without_the_driver_s_function_both_are_launched_as_usual(fake_device: FakeDevice) -> None:
    _run(_split())
    assert len(fake_device.launched) == 2

"""Launches of kernels that may begin before the kernel before them has ended."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.cuda import launch, overlap

from ..kit.native_frame import LaunchConfig
from .fake_device import ADDRESS, FakeDevice, fake_device

__all__ = ["fake_device"]


class FakeFunction:
    """cuLaunchKernelEx, which notes its arguments and returns an error."""

    argtypes: Any = None

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.given: list[tuple[Any, ...]] = []

    def __call__(self, config: Any, function: int, parameters: int, extra: Any) -> int:
        one = LaunchConfig.from_address(ctypes.addressof(config._obj))
        grid, block = (one.x, one.y, one.z), (one.threads, one.ty, one.tz)
        attribute = (ctypes.c_int64 * 2).from_address(one.attributes)
        where = function, parameters, extra
        self.given.append((grid, block, one.shared, one.stream, one.count, [*attribute], where))
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
    assert launch_early(11, (5, 1, 1, 64, 1, 1, 4096), 1 << 40, 13) == 7
    sizes = (5, 1, 1), (64, 1, 1), 4096
    assert function.given == [(*sizes, 1 << 40, 1, [6, 1], (11, 13, None))]


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


def _run(plan: launch.PreparedPlan) -> None:
    plan.run(tuple(ADDRESS for _ in plan.names), ADDRESS, 0)


def test_only_the_merge_overlaps(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    early: list[tuple[int, ...]] = []

    def launched(handle: int, shape: tuple[int, ...], stream: int, parameters: int) -> int:
        early.append((handle, *shape))
        return 0

    monkeypatch.setattr(launch, "overlapping_launch", lambda: launched)
    plan = _split()
    _run(plan)
    merge = plan.launches[1]
    assert early == [(merge.handle, *merge.shape)]
    assert len(fake_device.launched) == 1


def test_a_refused_launch_names_the_plan(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "overlapping_launch", lambda: lambda *given: 719)
    with pytest.raises(cuflash.LaunchError, match=r"fa2 on cuda.*refused: CUDA error 719"):
        _run(_split())


def test_without_the_driver_s_function_both_are_launched_as_usual(fake_device: FakeDevice) -> None:
    _run(_split())
    assert len(fake_device.launched) == 2


def test_other_devices_have_no_such_launches() -> None:
    from cuflash.planning.plan import plan

    from ..architectures import LIMITS
    from .test_forward_time import few

    for name in ("80", "89"):
        chosen = plan(few(1, (8, 2), (1, 4096)), LIMITS[name])
        assert chosen.tile.block_q == 16
        assert not any(one.overlaps for one in chosen.launches)
        assert len(chosen.launches) == 2
    wide = replace(few(1, (8, 2), (64, 4096)), storage="bfloat16")
    assert not any(one.overlaps for one in plan(wide, LIMITS["90"], algorithm="fa3").launches)

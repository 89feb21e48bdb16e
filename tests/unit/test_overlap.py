"""Launches of kernels that may begin before the kernel before them has ended."""

from __future__ import annotations

import ctypes
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.calls_to_come import Calls, problems_of
from cuflash.cuda import launch, overlap, source
from cuflash.planning.decision import Plan
from cuflash.planning.plan import plan
from cuflash.planning.problem import AttentionProblem

from ..architectures import LIMITS
from ..kit.native_frame import LaunchConfig
from .fake_device import ADDRESS, FakeDevice, fake_device
from .test_forward_time import few
from .test_plan_fa3 import planned
from .test_plan_fa3_backward import of_gradients

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
    function = FakeFunction()
    _driver(monkeypatch, function)
    launch_early = overlap.overlapping_launch()
    assert launch_early is not None
    sizes = [((n, 1, 1), (32 * m, 1, 1), k) for n in (1, 2) for m in (1, 2) for k in (0, 64)]
    asked = [(*size, stream) for size in sizes for stream in (0, 1 << 40)]
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

    monkeypatch.setattr(overlap, "_Config", Recorded)
    _driver(monkeypatch, FakeFunction())
    launch_early = overlap.overlapping_launch()
    assert launch_early is not None
    launch_it = launch_early(1, (1, 1, 1, 32, 1, 1, 0), 0, 2)
    gc.collect()
    assert [reference() is None for reference in made] == [False]
    assert launch_it() == 0
    del launch_it
    gc.collect()
    assert [reference() is None for reference in made] == [True]


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

    def launched(handle: int, shape: tuple[int, ...], stream: int, parameters: int) -> int:
        plan._kept.clear()
        gc.collect()
        others = [np.full(600, 7, np.uint8) for _ in range(1000)]  # take what was given back
        (place,) = (ctypes.c_void_p * 1).from_address(parameters)
        length = 8 * len(plan.launches[1].template)
        read.append(ctypes.string_at(place, length) if place == parameters - length else b"")
        return len(others) - 1000

    monkeypatch.setattr(launch, "overlapping_launch", _overlapping(launched))
    plan, read = _split(), list[bytes]()
    pointers, place = dict.fromkeys(plan.names, ADDRESS), 2 * ADDRESS
    expected = plan.launches[1].parameters(pointers, place, 0).words[:-1].tobytes()
    for _ in range(3):
        plan.run(tuple(pointers.values()), place, 0)
    assert read == [expected] * 3


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


def test_other_devices_have_no_such_launches() -> None:
    for name in ("80", "89"):
        chosen = plan(few(1, (8, 2), (1, 4096)), LIMITS[name])
        assert chosen.tile.block_q == 16
        assert not any(one.overlaps for one in chosen.launches)
        assert len(chosen.launches) == 2
    wide = replace(few(1, (8, 2), (64, 4096)), storage="bfloat16")
    assert not any(one.overlaps for one in plan(wide, LIMITS["90"], algorithm="fa3").launches)


def _gradients(heads: str, seqlens: int | tuple[int, int], **more: Any) -> AttentionProblem:
    """A plain problem; ``heads`` is a text "batch query heads/key heads"."""
    batch, heads_q, heads_kv = map(int, heads.replace("/", " ").split())
    queries, keys = (seqlens, seqlens) if isinstance(seqlens, int) else seqlens
    of = {"batch": batch, "heads_q": heads_q, "heads_kv": heads_kv, "mask": "full", "width": 128}
    return of_gradients(**{**of, "seqlen_q": queries, "seqlen_kv": keys, **more})


#: Plain backward passes, and their kernels after ``statistics``.
_BACKWARD = {
    "blocks convert": (_gradients("4 16/16", 4096), ["backward"]),
    "another kernel converts": (
        _gradients("4 16/16", 4096, width=192),
        ["backward", "convert_dq"],
    ),
    "parts": (_gradients("1 32/2", 2048, mask="causal"), ["backward", "sum_parts"]),
    "parts, and another kernel converts": (
        _gradients("1 32/2", 2048, mask="causal", width=192),
        ["backward", "convert_dq", "sum_parts"],
    ),
    "deterministic": (_gradients("1 32/2", 2048, deterministic=True), ["backward", "sum_parts"]),
    "a window": (_gradients("4 16/16", 4096, mask="band", q_first=-300), ["backward"]),
    "blocks stay": (_gradients("64 4/4", 512, width=32), ["backward", "convert_dq"]),
    "few": (_gradients("16 8/8", (77, 4096)), ["backward_few", "convert_dq"]),
    "short": (_gradients("64 12/12", 197, width=64), ["backward_short"]),
}


@pytest.mark.parametrize("name", _BACKWARD)
def test_every_kernel_of_a_plain_backward_pass_but_the_first_begins_early(name: str) -> None:
    problem, kernels = _BACKWARD[name]
    chosen = planned(problem)
    assert [one.config.kernel for one in chosen.launches] == ["statistics", *kernels]
    assert [one.overlaps for one in chosen.launches] == [False] + [True] * len(kernels)
    assert [one.config.waits for one in chosen.launches] == [False] + [True] * len(kernels)


def _waits(chosen: Plan) -> list[bool]:
    return [one.overlaps or one.config.waits for one in chosen.launches]


def test_no_kernel_of_a_pass_with_features_begins_early() -> None:
    some = Calls(
        ((128, 128),), ("float16",), ("backward",), softcap=(True, False), alibi=(True, False),
        sinks=("float32", None), dropout=(True, False), seqlens=((512, 512),),
    )  # fmt: skip
    arrays = replace(some, softcap=(False,), alibi=(False,), sinks=(None,), dropout=(False,))
    arrays = replace(arrays, bias=("qk", None), mask_array=("k", None), block_mask=(None, (64, 64)))
    lengths = replace(arrays, bias=(None,), mask_array=(None,), block_mask=(None,))
    lengths = replace(lengths, used_lengths=(True, False), packed=(True, False))
    seen: set[str] = set()
    for problem in (one for calls in (some, arrays, lengths) for one in problems_of(calls)):
        chosen = plan(problem, LIMITS["90"], algorithm="fa3")
        others = [not problem.uses] * (len(chosen.launches) - 1)
        assert _waits(chosen) == [False, *others], problem.features
        seen |= {*problem.features}
    assert seen == {
        *("softcap", "alibi", "sinks", "dropout", "bias", "mask", "block_mask"),
        *("used_lengths", "packed_lengths"),
    }


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
def test_no_kernel_of_another_pass_waits_first_of_all(algorithm: Any) -> None:
    for problem in (few(1, (8, 2), (1, 4096)), few(4, (8, 8), (1000, 1000))):
        chosen = plan(problem, LIMITS["90"], algorithm=algorithm)
        assert not any(one.config.waits for one in chosen.launches)
    if algorithm != "fa3":
        backward = _gradients("4 16/16", 4096)
        assert not any(_waits(plan(backward, LIMITS["90"], algorithm=algorithm)))


def test_the_text_of_a_kernel_waits_before_it_does_anything(root: Path) -> None:
    _, main, *_ = planned(_gradients("4 16/16", 4096)).launches
    include, call = '#include "ptx/dependent_launch.cuh"', "cuflash::ptx::wait_for_kernel_before();"
    text = source.translation_unit(main.config, root / "cuda_src")
    assert text.count(include) == text.count(call) == 1
    assert text.index(include) < text.index("struct Config")
    body = text[text.index(f"{main.config.entry}(") :].split("{", 1)[1]
    assert [line.strip() for line in body.splitlines()][1:] == [
        call,
        "cuflash::fa3::backward<Config>(params);",
        "}",
    ]
    plain = source.translation_unit(replace(main.config, waits=False), root / "cuda_src")
    assert "dependent_launch" not in plain
    assert "wait_for_kernel_before" not in plain

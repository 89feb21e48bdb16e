"""Plans and launches on a fake device: alignment, messages about the compiler, and graphs."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import dispatch, pipeline
from cuflash.arrays.adopt import adopt
from cuflash.cuda.tensor_map import WORDS
from cuflash.options import Options
from cuflash.pipeline import CallPlan, plan_call
from cuflash.planning import device

from ..architectures import LIMITS
from .fake_device import ADDRESS, COUNTER, FakeDevice, device_array, fake_device

__all__ = ["fake_device"]

SHAPE = (2, 100, 4, 64)


def _planned(arrays: dict[str, Any], operation: Any = "forward", **options: Any) -> CallPlan:
    given = tuple((name, adopt(name, array).spec) for name, array in arrays.items())
    return plan_call(operation, given, Options(**options), 0)


def _arrays(shape: tuple[int, ...] = SHAPE, **others: Any) -> dict[str, Any]:
    return {name: device_array(shape) for name in ("q", "k", "v")} | others


def _broadcast() -> Any:
    import cupy

    return cupy.broadcast_to(device_array((2, 100, 1, 64)), SHAPE)


@pytest.mark.parametrize(
    ("change", "alignment"),
    [
        ({}, "tensor_map"),
        ({"k": lambda: device_array((2, 100, 4, 128))[..., :64]}, "tensor_map"),
        ({"k": _broadcast}, "vector"),
        ({"v": lambda: device_array(SHAPE)[:, ::-1]}, "vector"),
        ({"out": lambda: device_array(SHAPE)[:, :, ::-1]}, "vector"),
        ({"q": lambda: device_array((2, 100, 4, 68))[..., :64]}, "element"),
        ({"q": lambda: device_array(SHAPE, address=ADDRESS + 8)}, "element"),
        ({"lse_out": lambda: device_array((2, 4, 101), np.float32)[..., :100]}, "tensor_map"),
    ],
)
def test_the_alignment_is_that_of_the_worst_matrix(
    fake_device: FakeDevice, change: dict[str, Any], alignment: str
) -> None:
    made = _planned(_arrays(**{name: make() for name, make in change.items()}))
    assert made.plan.problem.alignment == alignment
    assert made.plan.algorithm == ("fa3" if alignment == "tensor_map" else "fa2")
    assert not made.copied


def test_widths_that_are_no_multiple_of_16_bytes_are_not_mapped(fake_device: FakeDevice) -> None:
    assert _planned(_arrays((2, 100, 4, 60))).plan.problem.alignment == "element"
    assert _planned(_arrays((2, 100, 4, 56))).plan.problem.alignment == "tensor_map"


def _of_backward(shape: tuple[int, ...] = SHAPE) -> dict[str, Any]:
    """Arrays of a backward pass of float16."""
    lse = device_array((shape[0], shape[2], shape[1]), np.float32)
    return {name: device_array(shape) for name in ("dout", "q", "k", "v", "out")} | {"lse": lse}


def _old(monkeypatch: pytest.MonkeyPatch, architecture: str = "90") -> None:
    limits = replace(LIMITS[architecture], nvrtc=(12, 8))
    monkeypatch.setattr(pipeline.DeviceLimits, "query", lambda device_id: limits)


@pytest.mark.parametrize(
    "options",
    [
        {"operation": "forward"},
        {"operation": "backward"},
        {"operation": "backward", "deterministic": True},
        {"operation": "backward", "shape": (2, 100, 4, 136)},
    ],
)
def test_an_old_compiler_is_warned_of_once(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    _old(monkeypatch)
    shape = options.pop("shape", SHAPE)
    arrays = _of_backward(shape) if options["operation"] == "backward" else _arrays(shape)
    with pytest.warns(
        UserWarning, match=r"running fa2: fa3 needs NVRTC 12\.9.*pip install"
    ) as told:
        assert _planned(arrays, **options).plan.algorithm == "fa2"
    assert [one.filename for one in told] == [__file__]  # the file that called the library
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _planned(arrays, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "fa2"},
        {"operation": "backward", "shape": (2, 100, 4, 60)},
        {"dtype": np.float32},
        {"architecture": "80"},
        {"shape": (2, 100, 4, 60)},
    ],
)
def test_nobody_is_warned_where_a_newer_one_would_not_help(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    _old(monkeypatch, options.pop("architecture", "90"))
    shape = options.pop("shape", SHAPE)
    dtype = options.pop("dtype", np.float16)
    backward = options.get("operation") == "backward"
    arrays = _of_backward(shape) if backward else dict.fromkeys("qkv", device_array(shape, dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _planned(arrays, **options).plan.algorithm == "fa2"


def test_the_algorithm_by_name_is_refused_and_not_warned_of(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    _old(monkeypatch)
    with pytest.raises(cuflash.UnsupportedError, match=r"fa3 needs NVRTC 12\.9"):
        _planned(_arrays(), algorithm="fa3")


def test_a_launch_carries_maps_and_a_counter(fake_device: FakeDevice) -> None:
    prepared = cuflash.prepare(SHAPE, SHAPE, SHAPE, dtype="float16", causal=True)
    assert (prepared.plan.algorithm, prepared.workspace_bytes) == ("fa3", 4)
    pointers = {name: ADDRESS * (i + 1) for i, name in enumerate(prepared.tensors)}
    for shift in (0, 256, 0):  # other arrays have other maps
        moved = {name: address + shift for name, address in pointers.items()}
        prepared.run(moved, workspace=ADDRESS)
        launched = fake_device.launched[-1]
        for name in ("q", "k", "v"):
            words = launched[f"{name}_map"]["opaque"]
            assert words.shape == (WORDS,)
            assert int(words[0]) == moved[name]
        assert int(launched["out"]["data"]) == moved["out"]
        assert int(launched["lse"]["data"]) == moved["lse"]
        assert int(launched["tile_counter"]) == COUNTER
        assert (
            int(launched["head_group"]) == dict(prepared.plan.launches[0].arguments)["head_group"]
        )
        assert float(launched["scale"].view(np.float64)) == 0.125
        assert [int(launched["out"][f"{a}_stride"]) for a in ("batch", "row", "head")] == [
            25600,
            256,
            64,
        ]


@pytest.mark.usefixtures("any_lengths")
def test_a_backward_launch_carries_maps_and_its_workspace(fake_device: FakeDevice) -> None:
    prepared = cuflash.prepare(SHAPE, SHAPE, SHAPE, dtype="float16", operation="backward")
    assert prepared.plan.algorithm == "fa3"
    pointers = {name: ADDRESS * (i + 1) for i, name in enumerate(prepared.tensors)}
    prepared.run(pointers, workspace=ADDRESS * 99)
    statistics, launched, convert = fake_device.launched
    for name in ("q", "k", "v", "dout"):
        assert int(launched[f"{name}_map"]["opaque"][0]) == pointers[name]
    for name in ("dk", "dv"):
        assert int(launched[name]["data"]) == pointers[name]
    assert int(convert["dq"]["data"]) == pointers["dq"]
    parts = {buffer.name: ADDRESS * 99 + buffer.offset for buffer in prepared.plan.workspace}
    for name in ("row_lse", "delta", "dq_accumulator", "turns"):
        assert int(launched[name]) == int(statistics[name]) == parts[name]
    assert int(convert["dq_accumulator"]) == parts["dq_accumulator"]
    before, main, _ = (dict(one.arguments) for one in prepared.plan.launches)
    for name in ("head_group", "padded_rows", "ahead"):
        assert int(launched[name]) == main[name]
    for name in ("padded_rows", "cleared"):
        assert int(statistics[name]) == before[name]
    assert float(launched["scale"].view(np.float64)) == 0.125


def test_the_counter_may_be_the_first_of_the_workspace(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int, int]] = []

    def counter(device_id: int, stream: int, workspace: int) -> int:
        asked.append((device_id, stream, workspace))
        return workspace

    monkeypatch.setattr("cuflash.cuda.launch.counter_of_launch", counter)
    prepared = cuflash.prepare(SHAPE, SHAPE, SHAPE, dtype="float16", device=1)
    pointers = {name: ADDRESS * (i + 1) for i, name in enumerate(prepared.tensors)}
    prepared.run(pointers, 77, ADDRESS * 9)
    assert asked == [(1, 77, ADDRESS * 9)]
    assert int(fake_device.launched[0]["tile_counter"]) == ADDRESS * 9


def test_limits_say_the_version_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    names = ("MaxSharedMemoryPerBlockOptin", "MaxSharedMemoryPerMultiprocessor")
    names += ("MaxRegistersPerBlock", "MultiProcessorCount", "L2CacheSize")
    asked = SimpleNamespace(
        attributes={name: i for i, name in enumerate(names)}, compute_capability="90"
    )
    monkeypatch.setattr(cupy.cuda, "Device", lambda device_id: asked)
    properties = {"name": b"NVIDIA H200"}
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceProperties", lambda device_id: properties)
    monkeypatch.setattr(cupy.cuda.nvrtc, "getVersion", lambda: (12, 8))
    limits = device._query_device.__wrapped__(0)
    assert limits == device.DeviceLimits((9, 0), 0, 1, 2, 3, 4, (12, 8), "NVIDIA H200")

    def fail() -> None:
        raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr(cupy.cuda.nvrtc, "getVersion", fail)
    limits = device._query_device.__wrapped__(0)
    assert limits.nvrtc == (0, 0)  # what needs NVRTC reports that it is missing


@pytest.mark.parametrize("capturing", [False, True])
def test_a_graph_keeps_its_workspace(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch, capturing: bool
) -> None:
    """The graph runs long after the call; no other call may get that memory."""
    import cupy

    kept: list[Any] = []
    monkeypatch.setattr(cupy, "empty", device_array)
    monkeypatch.setattr(dispatch, "is_capturing", lambda stream: capturing)
    monkeypatch.setattr(dispatch, "_kept_for_graphs", kept)
    arrays = _arrays()
    for own in (None, device_array((256,), np.uint8, ADDRESS << 12)):
        cuflash.attention(**arrays, workspace=own)
    assert len(fake_device.launched) == 2
    assert [array.nbytes for array in kept] == ([4] if capturing else [])


@pytest.mark.parametrize("capturing", [False, True])
def test_a_graph_keeps_what_was_copied_for_it(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch, capturing: bool
) -> None:
    """An array whose last stride is not 1 is copied, as an input and as an output."""
    import cupy

    kept: list[Any] = []
    monkeypatch.setattr(cupy, "empty", device_array)
    monkeypatch.setattr(dispatch, "_copy", lambda array, *_: device_array(array.shape))
    monkeypatch.setattr(dispatch, "fill", lambda to, array: None)
    monkeypatch.setattr(dispatch, "is_capturing", lambda stream: capturing)
    monkeypatch.setattr(dispatch, "_kept_for_graphs", kept)
    wide = device_array((2, 100, 4, 128), address=ADDRESS << 4)
    arrays = _arrays() | {"k": wide[..., ::2]}
    out = device_array((2, 100, 4, 128), address=ADDRESS << 5)[..., ::2]
    cuflash.attention(**arrays, out=out)
    assert len(fake_device.launched) == 1
    assert [array.shape for array in kept[:2]] == ([arrays["k"].shape] * 2 if capturing else [])


def test_host_arrays_are_refused_in_a_capture(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "is_capturing", lambda stream: True)
    arrays = {name: np.zeros((2, 100, 4, 64), np.float16) for name in "qkv"}
    with pytest.raises(cuflash.ArgumentTypeError, match="in host memory while a CUDA graph"):
        cuflash.attention(**arrays, backend="cuda")
    assert not fake_device.launched


def test_nothing_is_allocated_for_a_counter_that_no_graph_needs(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    made: list[tuple[int, ...]] = []

    def empty(shape: Any, dtype: Any) -> Any:
        made.append(shape)
        return device_array(shape, dtype)

    monkeypatch.setattr(dispatch, "empty", lambda like, shape, dtype: device_array(shape, dtype))
    monkeypatch.setattr(cupy, "empty", empty)
    monkeypatch.setattr(dispatch, "is_capturing", lambda stream: False)
    cuflash.attention(**_arrays())
    assert len(fake_device.launched) == 1
    assert not made

"""The CUDA side of ``cuflash.jax``, on a fake device: what is lowered, and what is launched."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import dispatch

from .fake_device import FakeDevice, fake_device
from .jax_case import draw, jax, jnp, loss

__all__ = ["fake_device"]

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention
from cuflash.jax import device as on_device  # noqa: E402
from cuflash.jax.call import Call  # noqa: E402
from cuflash.jax.device import _place_of  # noqa: E402
from cuflash.jax.site import Site  # noqa: E402
from cuflash.options import Options  # noqa: E402

Q, KV = (2, 5, 4, 8), (2, 9, 2, 8)
STREAM = 77


@pytest.fixture(autouse=True)
def two_devices(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """JAX has the two devices of the fake."""
    monkeypatch.setattr(on_device, "_devices", lambda: [0, 1])
    monkeypatch.setattr(on_device, "_place_of", lambda buffer: (buffer.address, buffer.device))
    monkeypatch.setenv("CUFLASH_JAX_NATIVE", "0")
    return fake_device


class _Buffer:
    """Replaces a buffer of XLA."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, address: int, device: int) -> None:
        self.shape, self.address, self.device = shape, address, device


def _lowered(function: Any, *arrays: Any) -> str:
    traced = jax.jit(function).trace(*arrays)
    return str(traced.lower(lowering_platforms=("cuda",)).as_text())


def _prepared(operation: Any = "forward", mapped: tuple[int, ...] = (), **options: Any) -> Any:
    names = ("q", "k", "v") if operation == "forward" else ("dout", "q", "k", "v", "out", "lse")
    call = Call(operation, Options(**{"layout": "bshd", "q_offset": 0, **options})).taking(names)
    rows = (2, 4, 5)
    shapes = {"q": Q, "k": KV, "v": KV, "out": Q, "dout": Q, "lse": rows, "dlse": rows}
    kinds = {"lse": np.float32, "out": options.get("out_dtype", np.float16)}
    arrays = [
        jax.ShapeDtypeStruct((*mapped, *shapes[name]), kinds.get(name, np.float16))
        for name in names
    ]
    return on_device.prepare_device(call, arrays), arrays


def _run(prepared: Any, arrays: list[Any], device: int = 0, skewed: int = 0) -> dict[str, int]:
    """Run the callback, and return the address of every buffer by name."""
    shapes = [(shape, kind) for shape, kind in prepared.call.results_of(arrays)]
    if prepared.scratch_bytes:
        shapes.append(((prepared.scratch_bytes,), np.uint8))
    shapes += [(array.shape, array.dtype) for array in arrays]
    at = [(1 << 20) * (i + 1) + skewed for i in range(len(shapes))]
    buffers = [_Buffer(*shape, a, device) for shape, a in zip(shapes, at, strict=True)]
    split = len(shapes) - len(arrays)
    prepared(SimpleNamespace(stream=STREAM), buffers[:split], *buffers[split:])
    names = [*prepared.call.results, *["workspace"][: split - len(prepared.call.results)]]
    return dict(zip((*names, *prepared.call.named(arrays)), at, strict=True))


def _data(words: Any, name: str) -> int:
    return int(words[name]["data"])


def test_a_computation_for_cuda_calls_back_from_a_command_buffer() -> None:
    q, k, v = draw(Q, KV, KV, dtype="float16")
    text = _lowered(lambda *qkv: attention(*qkv, algorithm="fa1"), q, k, v)
    calls = re.findall(r"custom_call @(\w+)\(.*-> (.*)", text)
    needed = cuflash.prepare(Q, KV, KV, dtype="float16", algorithm="fa1").workspace_bytes
    assert [name for name, _ in calls] == ["xla_buffer_python_gpu_callback_cmd_buffer"]
    assert needed
    assert f"tensor<{needed + 256}xui8>" in calls[0][1]


def test_both_passes_are_lowered_for_cuda() -> None:
    q, k, v = draw(Q, KV, KV, dtype="float16")
    text = _lowered(jax.grad(loss(attention, return_lse=True)), q, k, v)
    assert text.count("custom_call @xla_buffer_python_gpu_callback_cmd_buffer") == 2
    assert "cpu_callback" not in text


def test_nothing_is_called_for_nothing() -> None:
    q, k, v = draw((2, 0, 4, 8), KV, KV, dtype="float16")
    assert "custom_call" not in _lowered(attention, q, k, v)


def test_what_the_device_refuses_is_said_when_lowering() -> None:
    q, k, v = draw(Q, KV, KV, dtype="float32")
    with pytest.raises(cuflash.UnsupportedError, match="fa3"):
        _lowered(lambda *qkv: attention(*qkv, algorithm="fa3"), q, k, v)


def test_the_platform_decides_and_not_what_is_installed(fake_device: FakeDevice) -> None:
    assert cuflash.pipeline.is_usable()  # type: ignore[attr-defined]
    ran: list[Any] = []
    q, k, v = draw(Q, KV, KV, dtype="float32")
    with dispatch.observe(ran.append):
        jax.block_until_ready(jax.grad(loss(attention))(q, k, v))
    assert [plan.backend for plan in ran] == ["numpy", "numpy"]
    assert not fake_device.launched


@pytest.mark.parametrize("device", [0, 1])
def test_a_callback_launches_on_xlas_stream_and_device(
    fake_device: FakeDevice, device: int
) -> None:
    prepared, arrays = _prepared(algorithm="fa2")
    at = _run(prepared, arrays, device)
    assert fake_device.queued == [(device, STREAM)]
    (words,) = fake_device.launched
    for name in ("q", "k", "v", "out", "lse"):
        assert _data(words, name) == at[name], name


def test_moved_buffers_are_launched_where_they_lie_now(fake_device: FakeDevice) -> None:
    """A launch is kept for each device and each list of addresses of the buffers."""
    prepared, arrays = _prepared(algorithm="fa1")
    for skewed, device in ((0, 0), (256, 0), (0, 1), (0, 0), (256, 0)):
        at = _run(prepared, arrays, device, skewed)
        assert fake_device.queued[-1] == (device, STREAM)
        words = fake_device.launched[-1]
        assert [_data(words, name) for name in ("q", "k", "v", "out")] == [
            at[name] for name in ("q", "k", "v", "out")
        ]
    assert len(fake_device.launched) == 5


def test_a_buffer_lies_where_dlpack_says() -> None:
    array = np.zeros((3, 4), np.float32)
    assert _place_of(array) == (array.ctypes.data, 0)
    assert _place_of(array[1:]) == (array.ctypes.data + 16, 0)


class _Capsuled:
    """A buffer whose DLPack structure has these words."""

    def __init__(self, *words: int) -> None:
        self._words = np.array(words, np.uint64)

    def __dlpack__(self) -> Any:
        make = ctypes.PYFUNCTYPE(
            ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
        )(("PyCapsule_New", ctypes.pythonapi))
        return make(self._words.ctypes.data, b"dltensor", None)


def test_a_buffer_may_begin_behind_its_data_on_any_device() -> None:
    data, device, axes, shape, strides, offset = 0x7F12_3456_7000, 5, 4, 1, 2, 768
    buffer = _Capsuled(data, device << 32 | 2, axes, shape, strides, offset)
    assert _place_of(buffer) == (data + offset, device)


@pytest.mark.parametrize("skewed", [0, 16, 128])
def test_the_workspace_begins_at_a_multiple_of_256(fake_device: FakeDevice, skewed: int) -> None:
    prepared, arrays = _prepared(algorithm="fa1")
    needed = max(p.workspace_bytes for p in prepared.prepared.values())
    given: list[tuple[int, int]] = []
    for one in prepared.prepared.values():
        one.bound = lambda _, workspace: lambda stream: given.append((stream, workspace))
    at = _run(prepared, arrays, skewed=skewed)
    ((stream, workspace),) = given
    assert stream == STREAM
    assert workspace % 256 == 0
    assert at["workspace"] <= workspace
    assert workspace + needed <= at["workspace"] + prepared.scratch_bytes


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_every_option_reaches_the_plan(operation: str) -> None:
    options = {"causal": True, "q_offset": 2, "scale": 0.3, "deterministic": True}
    prepared, _ = _prepared(operation, algorithm="fa1", **options)
    for one in prepared.prepared.values():
        problem = one.plan.problem
        assert (problem.operation, one.plan.algorithm) == (operation, "fa1")
        assert (problem.mask, problem.q_offset, problem.scale) == ("causal", 2, 0.3)
        assert problem.deterministic
        assert {n: spec.shape for n, spec in one.tensors.items() if n in "qkv"} == {
            "q": Q,
            "k": KV,
            "v": KV,
        }


def test_a_backward_callback_names_its_buffers(fake_device: FakeDevice) -> None:
    prepared, arrays = _prepared("backward", algorithm="fa2")
    given: list[Any] = []
    for one in prepared.prepared.values():
        one.bound = lambda pointers, _: given.append(pointers) or (lambda stream: None)
    at = _run(prepared, arrays)
    at.pop("workspace", None)
    assert given == [at]
    assert set(at) == {"dout", "q", "k", "v", "out", "lse", "dq", "dk", "dv"}
    taking = prepared.call.taking((*prepared.call.names, "dlse"))
    with_dlse = replace(prepared, call=taking)
    for one in with_dlse.prepared.values():
        one.bound = lambda pointers, _: given.append(pointers) or (lambda stream: None)
    at = _run(with_dlse, [*arrays, jax.ShapeDtypeStruct((2, 4, 5), jnp.float32)])
    assert given[1]["dlse"] == at["dlse"]


def test_every_part_of_divided_arrays_has_its_own_plan(fake_device: FakeDevice) -> None:
    """Every device plans for the shapes of its arrays, and finds the plan by these shapes."""
    site = Site(Call("forward", Options(layout="bshd", algorithm="fa2")), "cuda")
    parts = [(4, 5, 4, 8), (1, 5, 2, 8), (2, 5, 4, 8)]
    for shape in parts:
        arrays = [jax.ShapeDtypeStruct(shape, jnp.float16)] * 3
        out, lse = jax.eval_shape(site.compute, *arrays)
        assert (out.shape, lse.shape) == (shape, (shape[0], shape[2], shape[1]))
    for shape in parts:
        arrays = [_Buffer(shape, np.float16, (i + 1) << 20, 1) for i in range(3)]
        rows = _Buffer((shape[0], shape[2], shape[1]), np.float32, 5 << 20, 1)
        out = _Buffer(shape, np.float16, 4 << 20, 1)
        assert site(SimpleNamespace(stream=STREAM), *arrays, out, rows) == ()
        words = fake_device.launched[-1]
        assert [_data(words, name) >> 20 for name in ("q", "k", "v", "out", "lse")] == [
            1,
            2,
            3,
            4,
            5,
        ]
        problem = site.prepare(arrays).prepared[1].plan.problem
        assert (problem.batch, problem.heads_q) == (shape[0], shape[2])
    assert len(fake_device.launched) == len(parts)


def test_axes_of_vmap_are_part_of_the_batch(fake_device: FakeDevice) -> None:
    q, k, v = draw((3, *Q), (3, *KV), KV, dtype="float16")
    text = _lowered(jax.vmap(attention, in_axes=(0, 0, None)), q, k, v)
    assert "reshape" not in text
    assert text.count("custom_call @xla_buffer_python_gpu_callback_cmd_buffer") == 1
    prepared, _ = _prepared(mapped=(3, 2))
    assert all(p.plan.problem.batch == 12 for p in prepared.prepared.values())


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_a_float32_residual_reaches_the_plan(operation: str) -> None:
    prepared, _ = _prepared(operation, out_dtype="float32")
    for one in prepared.prepared.values():
        assert (one.plan.problem.storage, one.plan.problem.output) == ("float16", "float32")
        kinds = {name: spec.dtype for name, spec in one.tensors.items()}
        assert kinds["out"] == "float32"
        assert kinds.get("dout", "float16") == "float16"
        assert kinds.get("dq", "float16") == "float16"


def test_buffers_without_elements_have_no_address(fake_device: FakeDevice) -> None:
    call = Call("forward", Options(layout="bshd"))
    empty = (2, 0, 2, 8)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float16) for shape in (Q, empty, empty)]
    at = _run(on_device.prepare_device(call, arrays), arrays)
    (words,) = fake_device.launched
    assert (_data(words, "k"), _data(words, "v")) == (0, 0)
    assert _data(words, "out") == at["out"]


def test_without_cuda_devices_of_jax_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    if any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("JAX has a CUDA backend")
    q, k, v = draw(Q, KV, KV, dtype="float16")
    with pytest.raises(cuflash.BackendUnavailableError, match="JAX has no CUDA device here"):
        _lowered(attention, q, k, v)

"""Prepared calls, their workspace, and graphs made of them, on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash


def test_graphs_replay_bit_equal_with_new_data(cp: Any, problem: dict[str, Any]) -> None:
    expected = cuflash.attention(**problem, causal=True).get()
    prepared = cuflash.prepare(*problem.values(), causal=True)
    out = cp.full(problem["q"].shape, np.nan, np.float16)
    workspace = cp.empty(prepared.workspace_bytes, np.uint8)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        cuflash.attention(**problem, causal=True, out=out, workspace=workspace)
        graph = stream.end_capture()
        graph.launch()
        stream.synchronize()
        assert np.array_equal(out.get(), expected)
        problem["v"] += np.float16(1)
        out[...] = np.nan
        graph.launch()
        stream.synchronize()
    changed = cuflash.attention(**problem, causal=True).get()
    assert not np.array_equal(changed, expected)
    assert np.array_equal(out.get(), changed)


def test_prepared_calls_are_the_calls_themselves(cp: Any, problem: dict[str, Any]) -> None:
    out, lse = cuflash.attention(**problem, causal=True, return_lse=True)
    shapes = [array.shape for array in problem.values()]
    for spec in (shapes, list(problem.values())):
        prepared = cuflash.prepare(*spec, dtype="float16", causal=True)
        mine, mine_lse = cp.full_like(out, np.nan), cp.full_like(lse, np.nan)
        workspace = cp.full(prepared.workspace_bytes, 255, np.uint8)
        arrays = {**problem, "out": mine, "lse": mine_lse}
        pointers = {name: array.data.ptr for name, array in arrays.items()}
        stream = cp.cuda.Stream(non_blocking=True)
        cp.cuda.Device().synchronize()
        prepared.run(pointers, stream.ptr, workspace.data.ptr)
        stream.synchronize()
        assert bool((mine == out).all())
        assert bool((mine_lse == lse).all())
        assert set(prepared.tensors) == {"q", "k", "v", "out", "lse"}


def test_prepared_backward(cp: Any, problem: dict[str, Any]) -> None:
    out, lse = cuflash.attention(**problem, return_lse=True)
    grads = cuflash.attention_backward(out, *problem.values(), out, lse, deterministic=True)
    prepared = cuflash.prepare(*problem.values(), operation="backward", deterministic=True)
    workspace = cp.full(prepared.workspace_bytes, 255, np.uint8)
    mine = {n: cp.full_like(g, np.nan) for n, g in zip(("dq", "dk", "dv"), grads, strict=True)}
    arrays = {**problem, "out": out, "dout": out, "lse": lse, **mine}
    prepared.run({n: a.data.ptr for n, a in arrays.items()}, workspace=workspace.data.ptr)
    for got, expected in zip(mine.values(), grads, strict=True):
        assert bool((got == expected).all())


def test_prepared_backward_takes_dlse(cp: Any, problem: dict[str, Any]) -> None:
    out, lse = cuflash.attention(**problem, return_lse=True)
    given = (out, *problem.values(), out, lse)
    grads = cuflash.attention_backward(*given, dlse=lse, deterministic=True)
    prepared = cuflash.prepare(*problem.values(), operation="backward", deterministic=True)
    workspace = cp.full(prepared.workspace_bytes, 255, np.uint8)
    mine = {n: cp.full_like(g, np.nan) for n, g in zip(("dq", "dk", "dv"), grads, strict=True)}
    arrays = {**problem, "out": out, "dout": out, "lse": lse, "dlse": lse, **mine}
    prepared.run({n: a.data.ptr for n, a in arrays.items()}, workspace=workspace.data.ptr)
    for got, expected in zip(mine.values(), grads, strict=True):
        assert bool((got == expected).all())


_SPIN = """extern "C" __global__ void spin(long long n) {
  long long t = clock64(); while (clock64() - t < n) {}
}"""


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_prepared_runs_are_on_the_stream_of_another_device(
    cp: Any, problem: dict[str, Any], operation: str
) -> None:
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs a second CUDA device")
    out, lse = cuflash.attention(**problem, return_lse=True)
    results = {"out": out, "lse": lse}
    given = dict(problem)
    if operation == "backward":
        grads = cuflash.attention_backward(out, *problem.values(), out, lse, deterministic=True)
        given |= {"out": out, "dout": out, "lse": lse}
        results = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    expected = {name: array.get() for name, array in results.items()}
    host = {name: array.get() for name, array in given.items()}
    with cp.cuda.Device(1):
        source = {name: cp.asarray(array) for name, array in host.items()}
        arrays = {name: cp.zeros_like(array) for name, array in source.items()}
        mine = {name: cp.full(array.shape, np.nan, array.dtype) for name, array in expected.items()}
        tensors = [arrays[name] for name in "qkv"]
        prepared = cuflash.prepare(*tensors, operation=operation, deterministic=True)
        workspace = cp.full(prepared.workspace_bytes, 255, np.uint8)
        stream = cp.cuda.Stream(non_blocking=True)
        cp.cuda.Device().synchronize()
        with stream:  # this stream writes the inputs only after a while
            cp.RawKernel(_SPIN, "spin")((1,), (1,), (np.int64(200_000_000),))
            for name, array in arrays.items():
                array[...] = source[name]
    pointers = {name: array.data.ptr for name, array in {**arrays, **mine}.items()}
    prepared.run(pointers, stream.ptr, workspace.data.ptr)
    assert cp.cuda.Device().id == 0
    stream.synchronize()
    for name, array in mine.items():
        assert np.array_equal(array.get(), expected[name]), name


def test_prepared_runs_refuse_what_was_not_planned(cp: Any, problem: dict[str, Any]) -> None:
    prepared = cuflash.prepare(*problem.values(), algorithm="fa1")  # fa1 has a workspace
    out = cp.empty(problem["q"].shape, np.float16)
    pointers = {n: a.data.ptr for n, a in {**problem, "out": out}.items()}
    workspace = cp.empty(prepared.workspace_bytes, np.uint8).data.ptr
    with pytest.raises(cuflash.ArgumentValueError, match="pointers: got no v"):
        prepared.run({n: p for n, p in pointers.items() if n != "v"}, workspace=workspace)
    with pytest.raises(cuflash.ArgumentValueError, match="workspace: got address 0x0"):
        prepared.run(pointers)
    with pytest.raises(
        cuflash.ArgumentValueError, match=r"pointers: got k at 0x\w+; expected a mul"
    ):
        prepared.run({**pointers, "k": pointers["k"] + 2}, workspace=workspace)


def test_workspace_is_checked(cp: Any, problem: dict[str, Any]) -> None:
    problem["algorithm"] = "fa1"  # fa1 has a workspace
    tensors = [problem[name] for name in "qkv"]
    needed = cuflash.prepare(*tensors, algorithm="fa1").workspace_bytes
    good = cp.empty(needed + 256, np.uint8)
    expected = cuflash.attention(**problem)
    assert bool((cuflash.attention(**problem, workspace=good) == expected).all())
    with pytest.raises(cuflash.ArgumentValueError, match=f"workspace: got {needed - 1} bytes"):
        cuflash.attention(**problem, workspace=good[: needed - 1])
    with pytest.raises(cuflash.ArgumentValueError, match="256-byte aligned"):
        cuflash.attention(**problem, workspace=good[1:])
    with pytest.raises(cuflash.ArgumentTypeError, match="workspace: got float32"):
        cuflash.attention(**problem, workspace=good.view(np.float32))


def test_a_refused_launch_raises_and_leaves_the_process_usable(
    cp: Any, problem: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    expected = cuflash.attention(**problem)
    prepared = cuflash.prepare(*problem.values())
    kernels = prepared._launcher.launches
    broken = [replace(kernel, shape=(*kernel.shape[:-1], 10**9)) for kernel in kernels]
    monkeypatch.setattr(prepared._launcher, "launches", broken)
    out = cp.full_like(expected, np.nan)
    pointers = {n: a.data.ptr for n, a in {**problem, "out": out}.items()}
    workspace = cp.empty(prepared.workspace_bytes, np.uint8)
    with pytest.raises(cuflash.LaunchError, match=r"fa[23] on cuda.*launch was refused"):
        prepared.run(pointers, workspace=workspace.data.ptr)
    assert bool(cp.isnan(out).all())
    assert bool((cuflash.attention(**problem) == expected).all())

"""Unrequested gradients: on CUDA the kernels write them, into the workspace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import calls
from cuflash.tensors import QKV

from ..emulator.host_cupy import HostCupy, host_cupy
from .told_calls import no_kernel

_Q, _KV = (2, 40, 4, 64), (2, 24, 2, 48)
_WRT = st.lists(st.sampled_from(QKV), min_size=1, max_size=3, unique=True).map(tuple)


def _arrays(host: HostCupy, dtype: Any) -> dict[str, Any]:
    shapes = {"q": (*_Q[:3], 48), "k": _KV, "v": _KV, "out": (*_Q[:3], 48)}
    made = {n: host.array(np.zeros(shape, dtype)) for n, shape in shapes.items()}
    made["dout"] = host.array(np.zeros(shapes["out"], dtype))
    statistics = np.float64 if dtype is np.float64 else np.float32
    return made | {"lse": host.array(np.zeros((2, 4, 40), statistics))}


@settings(max_examples=40)
@given(
    wrt=_WRT,
    algorithm=st.sampled_from(["fa1", "fa2", "fa3"]),
    deterministic=st.booleans(),
    given_workspace=st.booleans(),
    given_grads=st.booleans(),
)
def test_they_lie_in_the_workspace(
    wrt: Any, algorithm: Any, deterministic: bool, given_workspace: bool, given_grads: bool
) -> None:
    """The audit checks every launch of first calls, of repeated calls and of prepared calls."""
    options = {"algorithm": algorithm, "deterministic": deterministic, "wrt": wrt}
    with host_cupy(make=no_kernel) as host:
        calls.forget()
        arrays = _arrays(host, np.float16)
        qkv = [arrays[n] for n in QKV]
        ready = cuflash.prepare(*qkv, operation="backward", **options)
        whole = cuflash.prepare(*qkv, operation="backward", **{**options, "wrt": QKV})
        extra = sum(arrays[n].size * 2 for n in QKV if n not in wrt)
        assert ready.workspace_bytes >= whole.workspace_bytes + extra
        assert (ready.workspace_bytes == whole.workspace_bytes) == ({*wrt} == {*QKV})
        assert ready.tensors.keys() == {*whole.tensors} - {f"d{n}" for n in QKV if n not in wrt}
        if given_workspace:
            options["workspace"] = host.array(np.zeros(ready.workspace_bytes, np.uint8))
        for _ in range(3):
            if given_grads:
                options["grads"] = [host.array(np.zeros(arrays[n].shape, np.float16)) for n in wrt]
            grads = host.call(cuflash.attention_backward, **arrays, **options)
            assert [g.shape for g in grads] == [arrays[n].shape for n in wrt]
            if given_grads:
                assert all(a is b for a, b in zip(grads, options["grads"], strict=True))
        (kept,) = calls._ready.values()
        assert kept.plan.problem.wrt == tuple(n for n in QKV if n in wrt)
        _check_run(host, ready)
        calls.forget()


def _check_run(host: HostCupy, ready: cuflash.Prepared) -> None:
    """A prepared run: the audit finds each gradient among the tensors or in the workspace."""
    host.auditor.plan = ready.plan
    arrays = {n: host.cupy.empty(spec.shape, spec.dtype) for n, spec in ready.tensors.items()}
    workspace = host.cupy.empty(ready.workspace_bytes, np.uint8)
    ready.run({n: a.data.ptr for n, a in arrays.items()}, workspace=workspace.data.ptr)


def test_a_workspace_without_room_for_them_is_refused() -> None:
    with host_cupy(make=no_kernel) as host:
        arrays = _arrays(host, np.float32)
        qkv = [arrays[n] for n in QKV]
        whole = cuflash.prepare(*qkv, operation="backward")
        workspace = host.array(np.zeros(whole.workspace_bytes, np.uint8))
        host.call(cuflash.attention_backward, **arrays, workspace=workspace)
        with pytest.raises(cuflash.ArgumentValueError, match="workspace: got"):
            host.call(cuflash.attention_backward, **arrays, wrt=("q",), workspace=workspace)


def test_the_order_of_wrt_is_not_part_of_the_plan() -> None:
    with host_cupy(make=no_kernel) as host:
        arrays = _arrays(host, np.float16)
        qkv = [arrays[n] for n in QKV]
        plans = [
            cuflash.prepare(*qkv, operation="backward", wrt=wrt).plan
            for wrt in (("v", "q"), ("q", "v"))
        ]
        assert plans[0] == plans[1]

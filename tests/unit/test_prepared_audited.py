"""Prepared runs from any current device match their arguments: every launch is checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash

from ..emulator.host_cupy import HostCupy, host_cupy
from .told_calls import no_kernel

_SHAPE, _ROWS = (2, 40, 4, 64), (2, 4, 40)


def _arrays(host: HostCupy, ready: cuflash.Prepared, device: int) -> dict[str, Any]:
    """An array for every tensor of the prepared call, as it describes them."""
    with host.runtime.on_device(device):
        return {
            name: host.cupy.empty(spec.shape, spec.dtype) for name, spec in ready.tensors.items()
        }


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
@pytest.mark.parametrize("wide", [False, True])
def test_every_launch(operation: Any, algorithm: Any, wide: bool) -> None:
    """The runs have different addresses, workspaces, streams, and current devices."""
    options: dict[str, Any] = {"operation": operation, "algorithm": algorithm, "causal": True}
    options["out_dtype"] = "float32" if wide else None
    with host_cupy(make=no_kernel) as host:
        for device in (0, 1):
            ready = cuflash.prepare(*[_SHAPE] * 3, dtype="float16", device=device, **options)
            host.auditor.plan = ready.plan
            launched: list[Any] = []
            host.runtime.audit = lambda launch, to=launched: (
                to.append(launch),
                host.auditor.launch(launch),
            )
            for turn in range(3):
                arrays = _arrays(host, ready, device)
                with host.runtime.on_device(device):
                    workspace = host.cupy.empty(max(ready.workspace_bytes, 1), np.uint8)
                pointers = {name: array.data.ptr for name, array in arrays.items()}
                with host.runtime.on_device(turn % 2), host.runtime.on_stream(70 + turn, device):
                    ready.run(pointers, workspace=workspace.data.ptr)
                    ready.run(pointers, stream=99, workspace=workspace.data.ptr)
                    assert host.runtime.device == turn % 2
                half = len(launched) // 2
                assert half == len(ready.plan.launches)
                assert {(one.device, one.stream) for one in launched[:half]} == {
                    (device, 70 + turn)
                }
                assert {(one.device, one.stream) for one in launched[half:]} == {(device, 99)}
                launched.clear()


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
@settings(max_examples=20)
@given(data=st.data())
def test_a_run_is_as_that_of_a_fresh_object(operation: Any, algorithm: Any, data: Any) -> None:
    """Earlier runs may have addresses under other names, in another order, or other streams."""
    with host_cupy(make=no_kernel) as host:
        launched: list[Any] = []
        host.runtime.audit = launched.append
        kept = _prepared(operation, algorithm)
        arrays = _arrays(host, kept, 0)
        workspace = host.cupy.empty(max(kept.workspace_bytes, 1), np.uint8).data.ptr
        rows = [name for name in arrays if name in ("lse", "dlse")]
        alike = [name for name in arrays if name not in rows]
        for turn in range(data.draw(st.integers(2, 4))):
            names = data.draw(st.permutations(alike), label="names")
            places = data.draw(st.sampled_from((alike, alike[::-1])), label="places")
            pointers = {n: arrays[at].data.ptr for n, at in zip(names, places, strict=True)}
            pointers |= {n: arrays[n].data.ptr for n in data.draw(st.permutations(rows))}
            current = data.draw(st.sampled_from((0, 77)), label="current stream")
            stream = data.draw(st.sampled_from((None, 0, 99)), label="stream")
            told = []
            for ready in (kept, _prepared(operation, algorithm)):
                launched.clear()
                with host.runtime.on_stream(current, 0):
                    ready.run(pointers, stream=stream, workspace=workspace)
                told.append([(one.config, one.parameters.tobytes()) for one in launched])
                expected = current if stream is None else stream
                assert {one.stream for one in launched} == {expected}, turn
            assert told[0] == told[1], turn


def _prepared(operation: Any, algorithm: Any) -> cuflash.Prepared:
    options: dict[str, Any] = {"operation": operation, "algorithm": algorithm}
    return cuflash.prepare(*[_SHAPE] * 3, dtype="float16", device=0, **options)

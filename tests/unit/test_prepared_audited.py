"""Prepared runs, from any current device, as what they are told: every launch is looked at."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash

from ..emulator.host_cupy import HostCupy, host_cupy
from .told_calls import no_kernel

_SHAPE, _ROWS = (2, 40, 4, 64), (2, 4, 40)


def _arrays(host: HostCupy, ready: cuflash.Prepared, device: int) -> dict[str, Any]:
    """One of every tensor, as described."""
    with host.runtime.on_device(device):
        return {
            name: host.cupy.empty(spec.shape, spec.dtype) for name, spec in ready.tensors.items()
        }


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
@pytest.mark.parametrize("wide", [False, True])
def test_every_launch(operation: Any, algorithm: Any, wide: bool) -> None:
    """Of several runs with other addresses, workspaces, streams, and current devices."""
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

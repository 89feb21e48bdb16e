"""Installs the stand-in of CuPy for the library, and watches calls of the library."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any
from unittest import mock

from cuflash import calls, dispatch, pipeline
from cuflash.cuda import available, current, launch, tensor_map, tile_counter
from cuflash.planning.kernel import KernelConfig
from cuflash.planning.plan import Plan

from ...architectures import LIMITS
from ..build import emulate
from ..device import _encode_map
from .audit import Auditor
from .memory import Block
from .module import modules_of
from .runtime import Runtime

__all__ = ["HostCupy", "host_cupy"]


@dataclass
class HostCupy:
    """The stand-in of CuPy, and its watched state."""

    cupy: ModuleType
    runtime: Runtime
    auditor: Auditor

    def array(self, values: Any, device: int = 0) -> Any:
        """A device array of these values, the test's own."""
        with self.runtime.on_device(device):
            return self.cupy.asarray(values)

    def call(self, function: Callable[..., Any], *arrays: Any, **keywords: Any) -> Any:
        """Call a public function, check everything that it does, and return its result.

        It must queue all work on the current stream of its arrays' device and allocate on that
        stream. It must use every device array that it gets, and leave the current device and
        stream as they were.
        """
        given = dict(_named([*arrays, *keywords.items()], self.runtime.ndarray))
        runtime, auditor = self.runtime, self.auditor
        device = next((a.data.device_id for a in given.values()), runtime.device)
        stream, before = runtime.stream_of(device), runtime.device
        runtime.queue.clear()
        auditor.used.clear()
        runtime.inside = True
        try:
            with dispatch.observe(self._told):
                results = function(*arrays, **keywords)
        finally:
            runtime.inside = False
        assert runtime.device == before, "the current device was changed"
        for queued in runtime.queue:
            where = f"{queued.what} on stream {queued.stream} of device {queued.device}"
            assert (queued.device, queued.stream) == (device, stream), where
            for block in queued.blocks:
                assert not block.inside or block.stream == queued.stream, where
        nothing = any(not array.size for array in given.values())
        if stream not in runtime.capturing and not nothing:
            self._check_used(given)
        runtime.memory.check()
        return results

    def _told(self, plan: Plan) -> None:
        self.auditor.tell(plan)

    def _check_used(self, given: Mapping[str, Any]) -> None:
        touched: set[Block] = set(self.auditor.used)
        touched.update(block for queued in self.runtime.queue for block in queued.blocks)
        plan = self.auditor.plan
        for name, array in given.items():
            used = array.data.block is None or array.data.block in touched
            needless = name.startswith("workspace") and not (plan and plan.eager_bytes)
            assert used or needless or not array.size, f"{name}: nothing used what was given"


def _named(values: Any, kind: type) -> Iterator[tuple[str, Any]]:
    for i, value in enumerate(values):
        name, value = value if isinstance(value, tuple) else (f"argument {i}", value)
        for j, one in enumerate(value if isinstance(value, (tuple, list)) else [value]):
            if isinstance(one, kind):
                yield f"{name}[{j}]", one


@contextlib.contextmanager
def host_cupy(
    architecture: str = "90",
    num_sms: int | None = None,
    make: Callable[[KernelConfig], Any] = emulate,
) -> Iterator[HostCupy]:
    """Within this context ``cupy`` is a stand-in with two devices of an architecture."""
    runtime = Runtime(make)
    auditor = Auditor(runtime)
    runtime.audit = auditor.launch
    modules = modules_of(runtime)
    limits = LIMITS[architecture]
    limits = replace(limits, num_sms=num_sms or limits.num_sms)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, modules))
        for owner, name, value in (
            (pipeline.DeviceLimits, "query", lambda _: limits),
            (pipeline, "require_toolchain", lambda: None),
            (launch, "compile_kernels", runtime.compiled),
            (launch, "overlapping_launch", lambda: None),
            (tensor_map, "_encode", lambda: _encode_map),
            (tile_counter, "_counters", {}),
            (current, "_thread", current._Thread()),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.callback(_forget)
        _forget()
        yield HostCupy(modules["cupy"], runtime, auditor)


def _forget() -> None:
    available._why_not.cache_clear()
    current._default_stream.cache_clear()
    calls.forget()

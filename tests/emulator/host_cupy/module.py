"""The modules that stand for ``cupy`` while the library runs on host memory."""

from __future__ import annotations

import types
from typing import Any

import numpy as np

from .runtime import DriverError, Runtime

__all__ = ["modules_of"]


class _RuntimeError(RuntimeError):
    """Stands for CUDARuntimeError."""


class _Stream:
    """Stands for cupy.cuda.ExternalStream."""

    def __init__(self, ptr: int, device_id: int = -1, runtime: Any = None) -> None:
        self.ptr, self._device, self._runtime = ptr, device_id, runtime

    def __enter__(self) -> _Stream:
        self._context = self._runtime.on_stream(self.ptr, self._device)
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


def modules_of(runtime: Runtime) -> dict[str, types.ModuleType]:
    """The modules by name, for ``sys.modules``."""
    cupy = _module("cupy", **_functions(runtime))
    cupy.ndarray = runtime.ndarray  # type: ignore[attr-defined]
    cupy.cuda = _cuda(runtime)  # type: ignore[attr-defined]
    cupy.lib = types.SimpleNamespace(  # type: ignore[attr-defined]
        stride_tricks=types.SimpleNamespace(as_strided=_as_strided)
    )
    streams = _module("stream", get_default_stream_ptr=lambda: 0)
    backends = _module("cupy_backends")
    backends.cuda = _module("cuda", stream=streams)  # type: ignore[attr-defined]
    return {
        "cupy": cupy,
        "cupy.cuda": cupy.cuda,  # type: ignore[attr-defined]
        "cupy_backends": backends,
        "cupy_backends.cuda": backends.cuda,  # type: ignore[attr-defined]
        "cupy_backends.cuda.stream": streams,
    }


def _module(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    return module


def _functions(runtime: Runtime) -> dict[str, Any]:
    ndarray = runtime.ndarray

    def zeros(shape: Any, dtype: Any = float) -> Any:
        made = ndarray(shape, dtype)
        host = made._host
        runtime.element_kernel([made], [], lambda: host.fill(0))
        return made

    def asarray(value: Any) -> Any:
        if isinstance(value, ndarray):
            return value
        if hasattr(value, "__cuda_array_interface__"):
            return value.array
        host = np.asarray(value)
        made = ndarray(host.shape, host.dtype)
        runtime.queued("copy from the host", [made])
        made._host[...] = host
        return made

    def ascontiguousarray(array: Any) -> Any:
        return array if array.flags.c_contiguous else array.astype(array.dtype)

    return {
        "__version__": "14.2.0",
        "empty": lambda shape, dtype=float: ndarray(shape, dtype),
        "zeros": zeros,
        "asarray": asarray,
        "asnumpy": lambda array: array.peek(),
        "ascontiguousarray": ascontiguousarray,
        "from_dlpack": lambda value: value.__dlpack__()[...],
        "int32": np.int32,
        "uint8": np.uint8,
    }


def _as_strided(array: Any, shape: Any, strides: Any) -> Any:
    host = np.lib.stride_tricks.as_strided(array._host, shape, strides)
    return array.seen(host)


def _cuda(runtime: Runtime) -> types.ModuleType:
    def current_stream(device_id: int = -1) -> Any:
        where = runtime.device if device_id < 0 else device_id
        return _Stream(runtime.stream_of(where), where, runtime)

    return _module(
        "cuda",
        Device=runtime.on_device,
        ExternalStream=lambda ptr, device_id=-1: _Stream(ptr, device_id, runtime),
        alloc=runtime.allocate,
        get_current_stream=current_stream,
        driver=types.SimpleNamespace(launchKernel=runtime.launch, CUDADriverError=DriverError),
        runtime=types.SimpleNamespace(
            is_hip=False,
            CUDARuntimeError=_RuntimeError,
            getDevice=lambda: runtime.device,
            setDevice=runtime.set_device,
            getDeviceCount=lambda: runtime.devices,
            streamIsCapturing=lambda stream: stream in runtime.capturing,
            memsetAsync=runtime.memset,
        ),
    )

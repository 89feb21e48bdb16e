"""A pass inside a computation on CUDA devices: prepared launches over XLA's own buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from ..errors import BackendUnavailableError
from ..pipeline import choose_device, plan_call
from ..prepared import Prepared
from .call import Call

__all__ = ["DeviceCall", "prepare_device"]

#: A prepared pass wants its workspace at a multiple of this; XLA promises less.
_ALIGNMENT = 256


@dataclass(frozen=True, eq=False)  # JAX hashes it
class DeviceCall:
    """The callback of one pass, compiled for every device that XLA may run it on.

    While XLA captures what it launches into a command buffer it allocates
    nothing and waits for nothing. Else the first fa3 forward launch of a stream
    allocates the counter of its tiles, see :meth:`cuflash.Prepared.run`.

    Attributes
    ----------
    call
        The pass.
    prepared
        Its kernels by device.
    """

    call: Call
    prepared: Mapping[int, Prepared]

    @property
    def scratch_bytes(self) -> int:
        """Bytes of one more result, in which the workspace lies; 0 if there is none."""
        needed = max(prepared.workspace_bytes for prepared in self.prepared.values())
        return needed + _ALIGNMENT if needed else 0

    def __call__(self, context: Any, results: Sequence[Any], *buffers: Any) -> None:
        """Launch the kernels on XLA's stream.

        Parameters
        ----------
        context
            Of the execution; ``stream`` is the address of XLA's CUDA stream.
        results, buffers
            Of the results, the workspace after them, and of the arguments, in
            the order of the call.
        """
        named = dict(zip((*self.call.results, "workspace"), results, strict=False))
        device = int(results[0].__dlpack_device__()[1])
        pointers = _addresses({**named, **self.call.named(buffers)}, context.stream, device)
        scratch = pointers.pop("workspace", 0)
        workspace = -(-scratch // _ALIGNMENT) * _ALIGNMENT
        self.prepared[device].run(pointers, context.stream, workspace)


def prepare_device(call: Call, arrays: Sequence[Any]) -> DeviceCall:
    """The callback of a pass over arrays like these.

    Kernels are compiled and loaded here, for every device that JAX has in this
    process: XLA does not say which of them it compiles for, and loading while
    it captures a command buffer would fail.

    Raises
    ------
    UnsupportedError, BackendUnavailableError, ToolchainError, CompileError
        As :func:`cuflash.prepare` does.
    """
    return DeviceCall(call, {device: _prepared(call, arrays, device) for device in _devices()})


def _prepared(call: Call, arrays: Sequence[Any], device: int) -> Prepared:
    """The kernels of a pass on one device."""
    options = replace(call.over(arrays).described, backend="cuda")
    given = tuple((name, spec.on_device(device)) for name, spec in call.specs(arrays).items())
    return Prepared(plan_call(call.operation, given, options, choose_device(device, options)))


def _devices() -> list[int]:
    """Numbers of JAX's CUDA devices, as CUDA and CuPy count them in this process."""
    try:
        return [int(device.local_hardware_id) for device in jax.local_devices(backend="cuda")]
    except RuntimeError as error:
        raise BackendUnavailableError(f"JAX has no CUDA device here: {error}") from error


def _addresses(buffers: Mapping[str, Any], stream: int, device: int) -> dict[str, int]:
    """Device address of every buffer; 0 of one without elements, which may have no memory.

    By DLPack: ``__cuda_array_interface__`` has no bfloat16. On XLA's stream,
    so that nothing has to wait for another one.
    """
    import cupy

    with cupy.cuda.Device(device), cupy.cuda.ExternalStream(stream, device):
        return {
            name: 0 if 0 in buffer.shape else int(cupy.from_dlpack(buffer).data.ptr)
            for name, buffer in buffers.items()
        }

"""A pass inside a computation on CUDA devices: prepared launches over XLA's buffers.

XLA calls the handler of :mod:`.native`, which launches the kernels of a table. If
the handler is not available, XLA calls Python.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ..bounded_cache import BoundedCache
from ..caches.planned import CachePlan
from ..errors import BackendUnavailableError
from ..pipeline import CallPlan
from ..prepared import Prepared
from .native import DevicePart, LaunchTable, number_of, tables
from .native.driver import context_of, driver_functions, new_counter
from .native.stamp import STAMP
from .passes import Pass

__all__ = ["DeviceCall", "prepare_device"]

#: A prepared pass needs its workspace at a multiple of this; XLA guarantees less.
_ALIGNMENT = 256

#: Number of runs that are kept.
_KEPT = 64


@dataclass(frozen=True, eq=False)  # JAX hashes it
class DeviceCall:
    """One pass, compiled for every device that XLA may run it on.

    Calling it launches the kernels. While XLA captures the launches into a command
    buffer, it allocates nothing and waits for nothing. Otherwise the first fa3
    forward launch of a stream allocates the counter of its tiles, see
    :meth:`cuflash.Prepared.run`.

    Attributes
    ----------
    call
        The pass.
    plans
        The plan, by device.
    """

    call: Pass
    plans: Mapping[int, CallPlan | CachePlan]

    @functools.cached_property
    def prepared(self) -> Mapping[int, Prepared]:
        """The kernels by device."""
        return {device: Prepared(planned) for device, planned in self.plans.items()}

    @functools.cached_property
    def scratch_bytes(self) -> int:
        """Bytes of one more result, which holds the workspace; 0 if the pass needs none."""
        needed = max(planned.workspace_bytes for planned in self.plans.values())
        return needed + _ALIGNMENT if needed else 0

    def __call__(self, context: Any, results: Sequence[Any], *buffers: Any) -> None:
        """Launch the kernels on XLA's stream.

        Parameters
        ----------
        context
            Context of the execution; ``stream`` is the address of XLA's CUDA stream.
        results, buffers
            Buffers of the results with the workspace after them, and buffers of the
            arguments, in the order of the call.
        """
        every = (*buffers, *results)
        places = tuple([_place_of(buffer) for buffer in every])
        run = self._runs.get(places)
        if run is None:
            run = self._run_of(places, every)
            self._runs[places] = run
        run(context.stream)

    @functools.cached_property
    def _runs(self) -> BoundedCache[tuple[tuple[int, int], ...], Callable[[int], None]]:
        """Runs by the addresses of their buffers: XLA often gives a program the same memory."""
        return BoundedCache(_KEPT)

    def _run_of(
        self, places: Sequence[tuple[int, int]], buffers: Sequence[Any]
    ) -> Callable[[int], None]:
        """Return a run over these buffers, as a function of the stream."""
        made = (*self.call.results, "workspace")[: len(buffers) - len(self.call.names)]
        names = (*self.call.names, *made)  # arrays written in place are in both, at one address
        at = [
            0 if 0 in buffer.shape else address  # an empty buffer may have no memory
            for (address, _), buffer in zip(places, buffers, strict=True)
        ]
        pointers = dict(zip(names, at, strict=True))
        scratch = pointers.pop("workspace", 0)
        workspace = -(-scratch // _ALIGNMENT) * _ALIGNMENT
        return self.prepared[places[0][1]].bound(pointers, workspace)

    def launch_table(self, driver: Sequence[int] | None = None) -> LaunchTable:
        """Return the table for the handler; ``driver`` replaces the driver's functions."""
        parts = []
        for device, planned in self.plans.items():
            launcher = planned.launcher
            counter = None if launcher.counter_offset is None else new_counter(device)
            parts.append(DevicePart(planned, context_of(device), counter))
        names = self.call.names, self.call.results
        return LaunchTable(*names, parts, driver or driver_functions())

    def registered(self, arrays: Sequence[Any]) -> int:
        """Return the number of the table of a pass over such arrays, for the handler."""
        kinds = [(tuple(array.shape), str(array.dtype)) for array in arrays]
        number = number_of(repr((STAMP, self.call, kinds)).encode())
        if number not in tables:
            table = self.launch_table()
            tables.add(number, table.address, table)
        return number


def prepare_device(call: Pass, arrays: Sequence[Any]) -> DeviceCall:
    """Return the callback of a pass over such arrays.

    Kernels are compiled and loaded now, for every device that JAX has in this
    process: XLA does not say which of them it compiles for, and loading fails
    while it captures a command buffer.

    Raises
    ------
    UnsupportedError, BackendUnavailableError, ToolchainError, CompileError
        As :func:`cuflash.prepare` does.
    """
    made = DeviceCall(call, {device: call.plan_on(arrays, device) for device in _devices()})
    for planned in made.plans.values():
        planned.launcher  # noqa: B018 (compiles and loads)
    return made


def _devices() -> list[int]:
    """Return the numbers of JAX's CUDA devices, as CUDA and CuPy count them in this process."""
    try:
        return [int(device.local_hardware_id) for device in jax.local_devices(backend="cuda")]
    except RuntimeError as error:
        raise BackendUnavailableError(f"JAX has no CUDA device here: {error}") from error


class _Tensor(ctypes.Structure):
    """A tensor as DLPack lays it out."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("device_kind", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("axes", ctypes.c_int32),
        ("dtype", ctypes.c_uint32),
        ("shape", ctypes.c_uint64),
        ("strides", ctypes.c_uint64),
        ("byte_offset", ctypes.c_uint64),
    )


#: Python's function that returns the address in a capsule.
_address_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _place_of(buffer: Any) -> tuple[int, int]:
    """Return the device address of a buffer and the number of its device.

    They are read from DLPack's structure: ``__cuda_array_interface__`` has no
    bfloat16, and making a CuPy array takes longer than launching a kernel.
    """
    capsule = buffer.__dlpack__()
    tensor = _Tensor.from_address(_address_in(capsule, b"dltensor"))
    return tensor.data + tensor.byte_offset, tensor.device

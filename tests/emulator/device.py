"""An emulated CUDA device: the library's own host code, with kernels compiled for the CPU."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np

import cuflash
from cuflash import calls, pipeline, prepared
from cuflash.cuda import launch, tensor_map
from cuflash.cuda.compile import CompiledKernel
from cuflash.planning.kernel import KernelConfig
from cuflash.planning.tiles.fa2_tables import FORWARD, ForwardRow

from ..architectures import LIMITS
from ..kit.arena import Arena
from ..kit.case import Case
from ..kit.data import operands, strided
from ..kit.strides import CONTIGUOUS, Strides, boxed
from .build import emulate, watched

__all__ = ["EmulatedRunner", "emulated_device", "on_device"]


@contextlib.contextmanager
def emulated_device(
    architecture: str, make: Callable[..., Any] = emulate, num_sms: int | None = None
) -> Iterator[None]:
    """Within this context ``prepare`` plans for an architecture, and its results run on the CPU.

    ``make`` makes the kernel of a configuration; ``num_sms`` replaces the number of
    multiprocessors of the architecture's device.
    """
    import cupy

    kernels: list[Any] = []

    def nothing(*_: Any) -> Any:
        return contextlib.nullcontext()

    def compiled(configs: Sequence[KernelConfig], device_id: int) -> list[CompiledKernel]:
        before = len(kernels)
        kernels.extend(map(make, configs))
        return [CompiledKernel(kernels[i], i, 0, 0) for i in range(before, len(kernels))]

    limits = LIMITS[architecture]
    limits = replace(limits, num_sms=num_sms or limits.num_sms)
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (pipeline.DeviceLimits, "query", lambda _: limits),
            (pipeline, "require_device", lambda: 0),
            (prepared, "require_device", lambda: 0),
            (prepared, "device_count", lambda: 1),
            (pipeline, "is_usable", lambda: True),
            (pipeline, "require_toolchain", lambda: None),
            (launch, "compile_kernels", compiled),
            (launch, "is_current", lambda _: True),
            (launch, "overlapping_launch", lambda: None),
            (launch, "counter_of_launch", lambda *_: _COUNTER.ctypes.data),
            (tensor_map, "_encode", lambda: _encode_map),
            (prepared, "current_stream", lambda _: 0),
            (cupy.cuda.driver, "launchKernel", lambda i, *more: _launch(kernels[i], *more)),
            (cupy.cuda, "Device", nothing),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        calls.forget()
        yield
    calls.forget()


#: The counter from which persistent kernels draw tiles; 0 before and after a launch.
_COUNTER = np.zeros(1, np.int32)


def _launch(kernel: Any, *numbers: int) -> None:
    """Launch a kernel with the arguments of the driver's launchKernel."""
    grid, _, _, threads, _, _, shared_bytes, _, parameters, _ = numbers
    _COUNTER[...] = 0
    kernel(grid, threads, shared_bytes, parameters)
    assert _COUNTER == 0, "the counter of tiles is not 0 after a launch"


def _encode_map(to: Any, kind: int, rank: int, address: Any, *more: Any) -> int:
    """Stand for the driver: write a map as ``cuda/ptx/tensor_copy.cuh`` reads it."""
    assert rank == 4
    itemsize = {0: 1, 6: 2, 7: 4, 9: 2}[kind]  # uint8, float16, float32, bfloat16
    sizes, strides, box, steps, interleave, swizzle, promotion, fill = more
    assert ([*box][2:], [*steps]) == ([1, 1], [1] * 4)
    width = box[0] * itemsize
    assert width == 128 or (width, itemsize) == (64, 1)
    assert (interleave, swizzle, fill) == (0, 3 if width == 128 else 0, 0)  # zeros outside
    assert promotion == (2 if itemsize == 1 else 3)  # 128 or 256 bytes
    assert box[1] <= 256
    assert all(number % 16 == 0 for number in (address.value, *strides))
    words = (address.value, *sizes, *strides, box[1], itemsize, width)
    (ctypes.c_uint64 * len(words)).from_address(to.value)[:] = words
    return 0


#: Arrays that broadcast against all pairs.
_PAIRS = ("bias", "mask")


@dataclass(frozen=True)
class EmulatedRunner:
    """A runner like the kit's: runs the device code of an architecture, in guarded buffers."""

    architecture: str = "90"
    algorithm: str = "fa1"
    blocks: tuple[int, int] | None = None  # for fa3 only in the forward pass
    deterministic: bool = False
    num_sms: int | None = None  # replaces the device's
    forward_row: ForwardRow | None = None  # the table of 16-bit forward tiles has only this row

    def tiles(self, case: Case, operation: str = "forward") -> tuple[int, int]:
        """``(block_q, block_kv)`` of the plan."""
        with self._device():
            tile = self.prepare(case, operation, self._shapes(case)).plan.tile
        return tile.block_q, tile.block_kv

    def kernels(self, case: Case, operation: str = "forward") -> list[str]:
        """The kernels that the plan launches, in order."""
        with self._device():
            plan = self.prepare(case, operation, self._shapes(case)).plan
        return [launch.config.kernel for launch in plan.launches]

    def forward(
        self,
        case: Case,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        **beside: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Out and lse."""
        given = {"q": q, "k": k, "v": v, **operands(case, **beside)}
        made = {"out": case.storage, "lse": case.statistics}
        return self._run(case, "forward", given, made)

    def backward(
        self,
        case: Case,
        dout: np.ndarray,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        out: np.ndarray,
        lse: np.ndarray,
        dlse: np.ndarray | None = None,
        **beside: np.ndarray,
    ) -> tuple[np.ndarray, ...]:
        """Gradients, as ``case.gradients`` names them."""
        given = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse}
        given |= operands(case, **beside)
        if dlse is not None:
            given["dlse"] = dlse
        return self._run(case, "backward", given, {n: case.dtype_of(n) for n in case.gradients})

    def configs(self, case: Case) -> set[KernelConfig]:
        """The kernels that both passes of a case compile."""
        found: set[KernelConfig] = set()
        for operation in ("forward", "backward"):
            arena = Arena(np, "nan")
            tensors = [
                on_device(
                    arena.input(n, np.zeros(case.shape(n), case.storage), self._recipe(case, n))
                )
                for n in "qkv"
            ]
            with self._device(found.add):
                self.prepare(case, operation, tensors)
        return found

    def reads(self, case: Case, x: dict[str, np.ndarray]) -> dict[str, dict[str, int]]:
        """Bytes of contiguous q, k and v that each pass copies to shared memory."""
        read: dict[str, dict[str, int]] = {"forward": {}, "backward": {}}
        given = {name: x[name] for name in "qkv"} | operands(case)
        made = {"out": case.storage, "lse": case.statistics}
        out, lse = self._run(case, "forward", given, made, read["forward"])
        given |= {"out": out, "dout": x["dout"], "lse": lse}
        made = {name: case.dtype_of(name) for name in case.gradients}
        self._run(case, "backward", given, made, read["backward"])
        return read

    def _run(
        self,
        case: Case,
        operation: str,
        given: dict[str, np.ndarray],
        made: dict[str, Any],
        read: dict[str, int] | None = None,
    ) -> Any:
        arena = Arena(np, "nan")
        inputs = {
            name: arena.input(name, array, self._recipe(case, name))
            for name, array in given.items()
        }
        results = {
            name: arena.output(name, case.shape(name), dtype, CONTIGUOUS)
            for name, dtype in made.items()
        }
        with self._device():
            tensors = [on_device(inputs[name]) for name in "qkv"]
            ready = self.prepare(case, operation, tensors, inputs)
            assert (ready.plan.backend, ready.plan.algorithm) == ("cuda", self.algorithm)
            workspace = arena.workspace(ready.workspace_bytes)
            pointers = {n: a.ctypes.data for n, a in {**inputs, **results}.items()}
            with watched([inputs[name] for name in "qkv"]) as watches:
                ready.run(pointers, workspace=workspace.ctypes.data)
        if read is not None:
            read |= {name: watch.bytes for name, watch in zip("qkv", watches, strict=True)}
        arena.check(case.repro)
        return tuple(results.values())

    @contextlib.contextmanager
    def _device(self, make: Callable[..., Any] = emulate) -> Iterator[None]:
        rows = {2: (self.forward_row,)} if self.forward_row else {}
        with emulated_device(self.architecture, make, self.num_sms), mock.patch.dict(FORWARD, rows):
            yield

    def _shapes(self, case: Case) -> list[tuple[int, ...]]:
        return [case.shape(name) for name in "qkv"]

    def prepare(
        self,
        case: Case,
        operation: Any,
        tensors: Any,
        inputs: Mapping[str, np.ndarray] = MappingProxyType({}),
    ) -> cuflash.Prepared:
        """The library's prepared call; only within :func:`emulated_device`."""
        return cuflash.prepare(
            *tensors,
            operation=operation,
            dtype=case.dtype,
            algorithm=self.algorithm,
            blocks=self.blocks if self.algorithm != "fa3" or operation == "forward" else None,
            deterministic=self.deterministic,
            **case.options,
            **self._keywords(case, operation, inputs),
        )

    def _recipe(self, case: Case, name: str) -> Strides:
        """The case's strides; contiguous where the library would have to copy first."""
        if name not in ("q", "k", "v", *_PAIRS):
            return CONTIGUOUS
        recipe = case.recipe(name)
        if name in _PAIRS:  # kernels take any strides, the copy engine does not
            own = boxed(case.shape(name), case.dtype_of(name).itemsize)
            return own if self.algorithm == "fa3" else recipe
        gap = any(recipe.gaps[-1:])
        moved = recipe.order and recipe.order[-1] != len(recipe.order) - 1
        return CONTIGUOUS if gap or moved else recipe

    def _keywords(
        self, case: Case, operation: str, inputs: Mapping[str, np.ndarray]
    ) -> dict[str, Any]:
        """The keywords of a call that describe arrays."""
        said: dict[str, Any] = {"wrt": case.wrt} if operation == "backward" else {}
        if case.sinks:
            said["sinks"] = case.sinks
        for name in {"alibi_slopes", "dropout_seed"} & set(case.operands):
            said[name] = case.shape(name)
        for name in set(_PAIRS) & set(case.operands):
            some = np.zeros(case.shape(name), case.dtype_of(name))
            own = inputs.get(name)
            said[name] = on_device(strided(some, self._recipe(case, name)) if own is None else own)
        return said


def on_device(array: np.ndarray) -> Any:
    """A CuPy array over the same memory; only kernels may read it."""
    import cupy

    memory = cupy.cuda.UnownedMemory(array.ctypes.data, 1 << 40, None, 0)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(array.shape, array.dtype, pointer, strides=array.strides)

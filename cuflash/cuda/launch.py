"""Packs the parameters of a plan's kernels and launches them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import LaunchError
from ..planning.kernel import KernelLaunch
from ..planning.plan import Plan
from .compile import CompiledKernel, compile_kernel
from .parameters import ROW_VECTOR, SHAPE_FIELDS, TENSOR, fields_of, parameters_of
from .tensor_map import WORDS, TensorMapEncoder
from .tile_counter import counter_of_launch

__all__ = ["PreparedPlan"]

#: Strides in elements of every tensor of a call: (batch, row, head).
Strides = Mapping[str, tuple[int, int, int]]

#: First word, tensor and what makes it, of every tensor map of a kernel.
Maps = tuple[tuple[int, str, TensorMapEncoder], ...]


#: Launches of a kernel whose parameters are kept.
_KEPT = 64


@dataclass(frozen=True)
class _Places:
    """Where a kernel's parameters hold what differs from launch to launch, in 64-bit words."""

    maps: Maps
    tensors: tuple[tuple[int, str], ...]  # word of a pointer, its name among the call's
    workspace: tuple[tuple[int, int], ...]  # word of a pointer, its offset in the workspace
    counter: int | None  # word of the tile counter's pointer

    @property
    def names(self) -> tuple[str, ...]:
        """Of all tensors, mapped ones first."""
        return (*(name for _, name, _ in self.maps), *(name for _, name in self.tensors))


class _Parameters:
    """A kernel's parameters for any addresses.

    Those of the last addresses are kept: most calls come again with the same.
    A launch only reads them, so threads share them.

    Parameters
    ----------
    template
        All that is the same in every launch.
    dtype
        The structure that the kernel takes.
    places
        Of the rest.
    """

    def __init__(
        self, template: npt.NDArray[np.uint64], dtype: np.dtype[np.void], places: _Places
    ) -> None:
        self._template = template
        self._dtype = dtype
        self._places = places
        self._names = places.names
        self._kept: dict[tuple[int, ...], npt.NDArray[np.void]] = {}

    def of(self, pointers: Mapping[str, int], workspace: int, counter: int) -> npt.NDArray[np.void]:
        """Those of one launch: one structure, not to be changed."""
        get = pointers.get
        key = (workspace, counter, *[get(name, 0) for name in self._names])
        found = self._kept.get(key)
        if found is None:
            found = self._filled(key[2:], workspace, counter)
            if len(self._kept) >= _KEPT:
                self._kept = {}  # a new one: other threads may be looking at the old
            self._kept[key] = found
        return found

    def _filled(
        self, addresses: tuple[int, ...], workspace: int, counter: int
    ) -> npt.NDArray[np.void]:
        words, places = self._template.copy(), self._places
        mapped = len(places.maps)
        for address, (word, _, encoder) in zip(addresses, places.maps, strict=False):
            encoder.write(address, words[word : word + WORDS])
        for address, (word, _) in zip(addresses[mapped:], places.tensors, strict=True):
            words[word] = address
        for word, offset in places.workspace:
            words[word] = workspace + offset
        if places.counter is not None:
            words[places.counter] = counter
        made: npt.NDArray[np.void] = words.view(self._dtype)
        return made


@dataclass(frozen=True)
class _PreparedKernel:
    kernel: CompiledKernel
    grid: tuple[int]
    block: tuple[int]
    shared_bytes: int
    parameters: _Parameters
    counter: int | None  # offset of the tile counter in the workspace

    def launch(self, pointers: Mapping[str, int], workspace: int, device_id: int) -> None:
        counter = 0
        if self.counter is not None:
            counter = counter_of_launch(device_id, workspace and workspace + self.counter)
        parameters = self.parameters.of(pointers, workspace, counter)
        self.kernel.function(self.grid, self.block, (parameters,), shared_mem=self.shared_bytes)


class PreparedPlan:
    """The kernels of a plan, compiled, with everything decided but the addresses.

    Parameters
    ----------
    plan
        A plan of the CUDA backend.
    strides
        Of every tensor of the call by name, in elements: (batch, row, head).
    device_id
        Where it will run.
    """

    def __init__(self, plan: Plan, strides: Strides, device_id: int) -> None:
        self.plan = plan
        self.device_id = device_id
        self._kernels = [
            _prepare_kernel(plan, launch, strides, device_id)
            for launch in plan.launches
            if launch.grid > 0
        ]

    @property
    def kernels(self) -> Sequence[CompiledKernel]:
        """The compiled kernels in the order they run."""
        return [prepared.kernel for prepared in self._kernels]

    def run(self, pointers: Mapping[str, int], workspace: int) -> None:
        """Launch on the current stream of the current thread, on the plan's device.

        Parameters
        ----------
        pointers
            Device address of every tensor by name; an absent one is null.
        workspace
            Address of ``plan.workspace_bytes`` bytes, a multiple of 256.

        Raises
        ------
        LaunchError
            If the driver refuses a launch.
        """
        import cupy

        with cupy.cuda.Device(self.device_id):
            for prepared in self._kernels:
                try:
                    prepared.launch(pointers, workspace, self.device_id)
                except cupy.cuda.driver.CUDADriverError as error:
                    raise LaunchError(f"{self.plan}: the launch was refused: {error}") from error


def _prepare_kernel(
    plan: Plan, launch: KernelLaunch, strides: Strides, device_id: int
) -> _PreparedKernel:
    config = launch.config
    struct = parameters_of(config.generation, config.kernel)
    values: Any = np.zeros(1, dtype=struct.dtype)
    for name in struct.dtype.names or ():
        kind = values.dtype[name]
        if kind in (TENSOR, ROW_VECTOR) and name in strides:
            batch, row, head = strides[name]
            values[name]["batch_stride"] = batch
            values[name]["row_stride"] = row
            values[name]["head_stride"] = head
    for name in SHAPE_FIELDS:
        values["shape"][name] = getattr(plan.problem, name)
    if "scale" in (struct.dtype.names or ()):
        values["scale"] = plan.problem.scale
    for name, value in launch.arguments:
        values[name] = value
    parts = {name: (word, offset) for name, word, offset in _workspace_words(struct.dtype, plan)}
    counter_word, counter = parts.pop("tile_counter", (None, None))
    places = _Places(
        maps=tuple(_map_words(struct.dtype, plan, launch, strides)),
        tensors=tuple(_tensor_words(struct.dtype)),
        workspace=tuple(parts.values()),
        counter=counter_word,
    )
    return _PreparedKernel(
        kernel=compile_kernel(config, device_id),
        grid=(launch.grid,),
        block=(config.threads,),
        shared_bytes=config.shared_bytes,
        parameters=_Parameters(values.view(np.uint64), struct.dtype, places),
        counter=counter,
    )


def _tensor_words(dtype: np.dtype[np.void]) -> list[tuple[int, str]]:
    return [
        (offset // 8, name)
        for name, (kind, offset) in fields_of(dtype).items()
        if kind in (TENSOR, ROW_VECTOR)
    ]


def _map_words(
    dtype: np.dtype[np.void], plan: Plan, launch: KernelLaunch, strides: Strides
) -> Iterator[tuple[int, str, TensorMapEncoder]]:
    """First word of every tensor map, the name of its tensor and what makes the map."""
    fields = fields_of(dtype)
    shapes = plan.problem.shapes
    for name, rows in launch.boxes:
        encoder = TensorMapEncoder(plan.problem.storage, shapes[name], strides[name], rows)
        yield fields[f"{name}_map"][1] // 8, name, encoder


def _workspace_words(dtype: np.dtype[np.void], plan: Plan) -> Iterator[tuple[str, int, int]]:
    """Name, word of the pointer and offset of every part of the workspace that a kernel takes."""
    fields = fields_of(dtype)
    for buffer in plan.workspace:
        if buffer.name in fields:
            yield buffer.name, fields[buffer.name][1] // 8, buffer.offset

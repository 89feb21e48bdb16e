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


class _Parameters:
    """A kernel's parameters but for what changes with every launch, by its mapped tensors.

    Those of the last addresses are kept: most calls come again with the same.
    """

    def __init__(self, template: npt.NDArray[np.uint64], maps: Maps) -> None:
        self._template = template
        self._maps = maps
        self._last: tuple[list[int], npt.NDArray[np.uint64]] = ([], template)

    def words_of(self, pointers: Mapping[str, int]) -> npt.NDArray[np.uint64]:
        """Words for one launch to fill."""
        addresses = [pointers[name] for _, name, _ in self._maps]
        last, words = self._last
        if last != addresses:
            words = self._template.copy()
            for address, (word, _, encoder) in zip(addresses, self._maps, strict=True):
                words[word : word + WORDS] = encoder.map_of(address)
            self._last = addresses, words
        mine: npt.NDArray[np.uint64] = words.copy()  # others may be launching from the same
        return mine


@dataclass(frozen=True)
class _PreparedKernel:
    kernel: CompiledKernel
    grid: tuple[int]
    block: tuple[int]
    shared_bytes: int
    parameters: _Parameters
    dtype: np.dtype[np.void]
    tensors: tuple[tuple[int, str], ...]  # word of a pointer, its name among the call's
    workspace: tuple[tuple[int, int], ...]  # word of a pointer, its offset in the workspace
    counter: tuple[int, int] | None  # word of the tile counter's pointer, offset in the workspace

    def launch(self, pointers: Mapping[str, int], workspace: int, device_id: int) -> None:
        words = self.parameters.words_of(pointers)
        if self.counter is not None:
            word, offset = self.counter
            words[word] = counter_of_launch(device_id, workspace + offset)
        for word, name in self.tensors:
            words[word] = pointers.get(name, 0)
        for word, offset in self.workspace:
            words[word] = workspace + offset
        self.kernel.function(
            self.grid, self.block, (words.view(self.dtype),), shared_mem=self.shared_bytes
        )


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
    counter = parts.pop("tile_counter", None)
    return _PreparedKernel(
        kernel=compile_kernel(config, device_id),
        grid=(launch.grid,),
        block=(config.threads,),
        shared_bytes=config.shared_bytes,
        parameters=_Parameters(
            values.view(np.uint64), tuple(_map_words(struct.dtype, plan, launch, strides))
        ),
        dtype=struct.dtype,
        tensors=tuple(_tensor_words(struct.dtype)),
        workspace=tuple(parts.values()),
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

"""Packs the parameters of a plan's kernels and launches them."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..bounded_cache import BoundedCache
from ..errors import LaunchError
from ..planning.kernel import KernelConfig, KernelLaunch
from ..planning.plan import Plan
from ..planning.problem import DTYPES, ElementName
from .compile import CompiledKernel, compile_kernels
from .current import is_current
from .overlap import overlapping_launch
from .parameters import SHAPE_FIELDS, STRIDED, ParameterStruct, fields_of, struct_of
from .prepared_kernel import Launches, Places, PreparedKernel
from .tensor_map import TensorMapEncoder
from .tile_counter import counter_of_launch

__all__ = ["PreparedPlan"]

#: Strides, in elements, of every tensor of a call: (batch, row, head), and for a tensor that
#: broadcasts (batch, row, head, column).
Strides = Mapping[str, tuple[int, ...]]

#: The stride fields in the parameters.
_STRIDES = ("batch_stride", "row_stride", "head_stride", "column_stride")

#: The number of launches of a plan that are kept.
_KEPT = 128


class PreparedPlan:
    """The compiled kernels of a plan, with everything decided except the addresses.

    Parameters
    ----------
    plan
        A plan of the CUDA backend.
    strides
        Strides of every tensor of the call by name, in elements: (batch, row, head), and of a bias
        (batch, row, head, column).
    device_id
        The device that will run it.

    Attributes
    ----------
    names
        Names of the tensors, in the order of the addresses of a run.
    kernels
        The compiled kernels, in the order in which they run.
    launches
        The same kernels, ready to launch.
    counter_offset
        Offset in the workspace, in bytes, of a tile counter; None without one.

    Notes
    -----
    The latest launches are kept with all their arguments: most calls repeat earlier addresses, and
    then nothing needs to be packed. A kept launch keeps no array of the caller's.
    """

    def __init__(self, plan: Plan, strides: Strides, device_id: int) -> None:
        import cupy

        self._cuda = cupy.cuda
        self.plan = plan
        self.device_id = device_id
        self.names = tuple(strides)
        launches = [launch for launch in plan.launches if launch.grid > 0]
        configs = [launch.config for launch in launches]
        self.kernels: Sequence[CompiledKernel] = compile_kernels(configs, device_id)
        self.launches = [
            _prepare_kernel(plan, launch, strides, kernel.handle)
            for launch, kernel in zip(launches, self.kernels, strict=True)
        ]
        offsets = [buffer.offset for buffer in plan.workspace if buffer.name == "tile_counter"]
        self.counter_offset = offsets[0] if offsets else None
        overlaps = any(one.overlaps for one in self.launches)
        self._overlapping = overlapping_launch() if overlaps else None
        self._kept: BoundedCache[tuple[int, ...], Launches] = BoundedCache(_KEPT)

    def run(self, addresses: tuple[int, ...], workspace: int, stream: int) -> None:
        """Launch on a stream of the plan's device, whatever the current device is.

        Parameters
        ----------
        addresses
            Addresses of all tensors in the order of :attr:`names`; 0 for an absent one.
        workspace
            Address of ``plan.workspace_bytes`` bytes, a multiple of 256.
        stream
            Address of the stream.

        Raises
        ------
        LaunchError
            If the driver refuses a launch.
        """
        stream = operator.index(stream)  # 77.0 is the same key as 77, but no address
        if is_current(self.device_id):
            self.launch(addresses, workspace, stream)
            return
        with self._cuda.Device(self.device_id):
            self.launch(addresses, workspace, stream)

    def launch(self, addresses: Sequence[int], workspace: int, stream: int) -> None:
        """Launch like :meth:`run`, after :func:`is_current` has returned True for the device."""
        counter = 0
        if self.counter_offset is not None:
            place = workspace and workspace + self.counter_offset
            counter = counter_of_launch(self.device_id, stream, place)
        key = (stream, workspace, counter, *addresses)
        kept = self._kept.get(key)
        if kept is None:
            kept = self._make(key)
        every, _ = kept  # other threads may empty what is kept
        try:
            for launch in every:
                failed = launch()
                if failed:
                    raise self._refused(f"CUDA error {failed}")
        except self._cuda.driver.CUDADriverError as error:
            raise self._refused(error) from error

    def _refused(self, why: object) -> LaunchError:
        return LaunchError(f"{self.plan}: the launch was refused: {why}")

    def _make(self, key: tuple[int, ...]) -> Launches:
        stream, workspace, counter, *addresses = key
        pointers = dict(zip(self.names, addresses, strict=True))
        how = stream, self._cuda.driver, self._overlapping
        every, made = [], []
        for kernel in self.launches:
            parameters = kernel.parameters(pointers, workspace, counter)
            every.append(kernel.launch(parameters, *how))
            made.append(parameters)
        self._kept[key] = kept = Launches(tuple(every), tuple(made))
        return kept


def _prepare_kernel(
    plan: Plan, launch: KernelLaunch, strides: Strides, handle: int
) -> PreparedKernel:
    config = launch.config
    struct = struct_of(config)
    values: Any = np.zeros(1, dtype=struct.dtype)
    for name in struct.dtype.names or ():
        kind = values.dtype[name]
        if kind in STRIDED and name in strides:
            for field, stride in zip(_STRIDES, strides[name], strict=False):
                values[name][field] = stride
    for name in SHAPE_FIELDS:
        values["shape"][name] = getattr(plan.problem, name)
    for name in {"scale", "factor"} & set(struct.dtype.names or ()):
        values[name] = getattr(plan.problem, name)
    for name, field, value in _of_features(plan, config, strides):
        values[name][field] = value
    for name, value in launch.arguments:
        (values["shape"] if name in SHAPE_FIELDS else values)[name] = value
    parts = {name: (word, offset) for name, word, offset in _workspace_words(struct, plan)}
    counter, _ = parts.pop("tile_counter", (None, 0))
    places = Places(
        maps=tuple(_map_words(struct, plan, launch, strides)),
        tensors=(*_tensor_words(struct.dtype), *_array_words(struct, strides)),
        workspace=tuple(parts.values()),
        counter=counter,
    )
    return PreparedKernel(
        name=config.kernel,
        handle=handle,
        shape=(launch.grid, 1, 1, config.threads, 1, 1, config.shared_bytes),
        template=values.view(np.uint64),
        places=places,
        overlaps=launch.overlaps,
    )


def _of_features(
    plan: Plan, config: KernelConfig, strides: Strides
) -> Iterator[tuple[str, str, int | float]]:
    """Feature, field and value of the features' parameters that are not addresses."""
    numbers = {use.feature: use.numbers for use in plan.problem.uses}
    for feature in config.features:
        block = feature.device.block
        for field, value in numbers[feature.name]:
            if field in (block.names or ()):
                yield feature.name, field, value
        for field, value in _own_strides(block, strides):
            yield feature.name, field, value


def _own_strides(block: np.dtype[np.void], strides: Strides) -> Iterator[tuple[str, int]]:
    """The fields of a feature's parameters that hold strides of its arrays, and their values."""
    names = block.names or ()
    for array in set(names) & set(strides):
        for stride, value in zip(_STRIDES, strides[array], strict=False):
            field = f"{array}_{stride}"
            if field in names:
                yield field, value


def _tensor_words(dtype: np.dtype[np.void]) -> list[tuple[int, str]]:
    return [
        (offset // 8, name) for name, (kind, offset) in fields_of(dtype).items() if kind in STRIDED
    ]


def _array_words(struct: ParameterStruct, names: Container[str]) -> Iterator[tuple[int, str]]:
    """Pointer word and name of every array that is not in a structure with its strides."""
    for path, offset in struct.offsets():
        *_, name = path.split(".")
        if name in names:
            yield offset // 8, name


def _map_words(
    struct: ParameterStruct, plan: Plan, launch: KernelLaunch, strides: Strides
) -> Iterator[tuple[int, str, TensorMapEncoder]]:
    """First word, tensor name and encoder of every tensor map."""
    problem = plan.problem
    fields = {path.removesuffix(".opaque"): offset for path, offset in struct.offsets()}
    places = {path.rpartition(".")[2]: offset for path, offset in fields.items()}
    for name, rows in launch.boxes:
        shape = problem.shapes.get(name)
        dtype: ElementName = problem.stored if name in ("k", "v") else problem.storage
        if shape is None:
            operand = problem.operands[name]
            entries, heads, queries, keys = operand.pairs
            dtype, shape = DTYPES[operand.dtype].name, (entries, queries, heads, keys)
        batch, row, head, *_ = strides[name]
        own = batch, row, head
        encoder = TensorMapEncoder(dtype, shape, own, rows)
        yield places[f"{name}_map"] // 8, name, encoder


def _workspace_words(struct: ParameterStruct, plan: Plan) -> Iterator[tuple[str, int, int]]:
    """Name, pointer word and offset of every part of the workspace that a kernel takes."""
    places = {path.rpartition(".")[2]: offset for path, offset in struct.offsets()}
    for buffer in plan.workspace:
        if buffer.name in places:
            yield buffer.name, places[buffer.name] // 8, buffer.offset

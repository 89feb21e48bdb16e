"""What every launch is held to: its parameters are those of arrays that are there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cuflash.cuda.parameters import PAIRS, ROW_VECTOR, STRIDED, TENSOR, TENSOR_MAP, fields_of
from cuflash.features.use import Operand
from cuflash.planning.kernel import KernelConfig
from cuflash.planning.plan import Plan
from cuflash.planning.problem import ELEMENTS

from .memory import Block
from .runtime import Launch, Runtime

__all__ = ["Auditor"]

#: What an append is given beside its matrices.
_LENGTHS = ("cache_seqlens", "rotary_seqlens", "lengths_after", "overflow")
_NUMBERS = (*_LENGTHS, "page_table", "cache_batch_idx", "rotary_cos", "rotary_sin")

#: Axes longer than 1, each with its stride in bytes, in no order.
Axes = list[tuple[int, int]]


@dataclass(frozen=True)
class _Tensor:
    """A tensor as a launch describes it."""

    name: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes, of all axes
    dtype: str

    @property
    def axes(self) -> Axes:
        return _axes(self.shape, self.strides)

    @property
    def is_vector(self) -> bool:
        """Whether its rows begin at, and are a multiple of, 16 bytes."""
        whole = [self.address, *(stride for _, stride in _axes(self.shape[:-1], self.strides[:-1]))]
        whole.append(self.shape[-1] * ELEMENTS[self.dtype].itemsize)
        return all(number % 16 == 0 for number in whole)


def _dense(shape: tuple[int, ...], itemsize: int) -> Iterator[int]:
    """Strides of a contiguous array as launches are told them: 0 of an axis of one element."""
    for axis, size in enumerate(shape):
        last = axis == len(shape) - 1
        yield 0 if size == 1 and not last else itemsize * math.prod(shape[axis + 1 :])


def _is_dense(tensor: _Tensor) -> bool:
    """Whether it is contiguous with rows before heads, or with heads before rows."""
    batch, rows, heads, depth = tensor.shape
    itemsize = ELEMENTS[tensor.dtype].itemsize
    batches, by_row, by_head, last = tensor.strides
    turned = (batches, by_head, by_row, last)
    return tensor.strides == tuple(_dense(tensor.shape, itemsize)) or turned == tuple(
        _dense((batch, heads, rows, depth), itemsize)
    )


def _axes(shape: Any, strides: Any) -> Axes:
    return sorted((n, int(s)) for n, s in zip(shape, strides, strict=True) if n > 1)


def _joined(axes: Axes) -> Axes:
    """The same elements with axes as long as they can be: heads and rows of a packed group."""
    joined: Axes = []
    for n, stride in sorted(axes, key=lambda axis: axis[1]):
        if joined and stride == joined[-1][0] * joined[-1][1]:
            joined[-1] = joined[-1][0] * n, joined[-1][1]
        else:
            joined.append((n, stride))
    return joined


@dataclass
class Auditor:
    """Looks at launches; ``plan`` is of the pass that they belong to, ``told`` those of others.

    Attributes
    ----------
    used
        Blocks that launches were given, and how.
    counters
        Tile counters by address, and the streams that launches drew from them on.
    """

    runtime: Runtime
    plan: Plan | None = None
    used: dict[Block, set[str]] = field(default_factory=dict)
    counters: dict[tuple[int, int], set[tuple[int, int]]] = field(default_factory=dict)
    told: dict[KernelConfig, Plan] = field(default_factory=dict)

    def tell(self, plan: Plan) -> None:
        """Launches to come are of this plan."""
        self.plan = plan
        self.told |= {one.config: plan for one in plan.launches}

    def launch(self, launch: Launch) -> None:
        """Raise AssertionError unless all its parameters are right."""
        if launch.replayed and not self._is_planned(launch):
            self.plan = self.told.get(launch.config)
        assert self._is_planned(launch), "a launch that nobody was told of"
        assert self.plan is not None
        tensors = [t for t in _tensors(launch, self.plan) if 0 not in t.shape]
        for tensor in tensors:
            self._check_tensor(tensor, launch)
        self._check_operands(launch)
        self._check_numbers(launch)
        self._check_alignment([t for t in tensors if len(t.shape) == 4], launch)
        self._check_workspace(launch)

    def _is_planned(self, launch: Launch) -> bool:
        return self.plan is not None and launch.config in [o.config for o in self.plan.launches]

    def _check_tensor(self, tensor: _Tensor, launch: Launch) -> None:
        assert self.plan is not None
        if tensor.name in ("dq", "dk", "dv") and tensor.name[1:] not in self.plan.problem.wrt:
            self._check_scratch(tensor, launch)
        else:
            self._check_array(tensor, launch)

    def _check_array(self, tensor: _Tensor, launch: Launch) -> None:
        assert self.plan is not None
        form = _joined if self.plan.problem.group_rows > 1 else list
        same = [
            array
            for array in list(self.runtime.ndarray.living)
            if array.data.ptr == tensor.address
            and array.dtype.name == tensor.dtype
            and form(_axes(array.shape, array.strides)) == form(tensor.axes)
        ]
        where = f"{launch.config.entry}: {tensor.name} at {tensor.address:#x}, {tensor.dtype}"
        assert same, f"{where}: no array of shape {tensor.shape}, strides {tensor.strides} is there"
        self._use(same[0].data.block, tensor.name, launch)

    def _check_operands(self, launch: Launch) -> None:
        """Arrays of features and their gradients are there, as they were planned."""
        assert self.plan is not None
        every = [(use, operand) for use in self.plan.problem.uses for operand in use.operands]
        for use, operand in every:
            for tensor in _operands(launch.parameters, use.feature, operand):
                if 0 not in operand.shape:
                    self._check_array(tensor, launch)

    def _check_numbers(self, launch: Launch) -> None:
        """Lengths and tables of an append are arrays that are there."""
        pointers = _pointers(launch.parameters) if launch.config.kernel == "append_kv" else {}
        for name in [name for name in _NUMBERS if pointers.get(name)]:
            same = [a for a in list(self.runtime.ndarray.living) if a.data.ptr == pointers[name]]
            assert same, f"{name}: no array at {pointers[name]:#x}"
            self._use(same[0].data.block, name, launch)

    def _check_scratch(self, tensor: _Tensor, launch: Launch) -> None:
        """A gradient that nobody asked for lies whole in the workspace, behind the plan's parts."""
        assert self.plan is not None
        block = self.runtime.memory.at(tensor.address)
        assert block is not None, f"{tensor.name} is nowhere"
        nbytes = math.prod(tensor.shape) * ELEMENTS[tensor.dtype].itemsize
        assert _is_dense(tensor), f"{tensor} has gaps, or overlaps itself"
        assert block.holds(tensor.address, nbytes), f"{tensor.name} has no room"
        assert tensor.address % 256 == 0
        arrays = [a for a in self.runtime.ndarray.living if a.data.block is block]
        behind = [tensor.address - a.data.ptr for a in arrays if a.dtype == "uint8"]
        assert any(place >= self.plan.workspace_bytes for place in behind), tensor.name
        for other in arrays:
            assert other.dtype == "uint8", f"{tensor.name} in the memory of an array"
        self._use(block, "workspace", launch)

    def _check_alignment(self, matrices: list[_Tensor], launch: Launch) -> None:
        claimed = launch.config.copies != "element"
        for tensor in matrices:
            assert not claimed or tensor.is_vector, (
                f"{launch.config.entry}: {launch.config.copies} copies of {tensor}"
            )

    def _check_workspace(self, launch: Launch) -> None:
        """Every part lies at its offset from one place, in one array of bytes, with its room."""
        assert self.plan is not None
        pointers, places = _pointers(launch.parameters), set()
        for part in self.plan.workspace:
            if part.name not in pointers or not part.nbytes:
                continue
            address = pointers[part.name]
            block = self.runtime.memory.at(address)
            assert block is not None, f"{part.name} is nowhere"
            if part.name == "tile_counter" and not launch.replayed:
                self._check_counter(address, block, launch)
                continue
            assert block.holds(address, part.nbytes), f"{part.name} has no room"
            places.add(address - part.offset)
            self._use(block, "workspace", launch)
        assert len(places) <= 1, "parts of several workspaces"
        for place in places:
            arrays = [a for a in self.runtime.ndarray.living if a.data.ptr == place]
            assert any(a.dtype == "uint8" for a in arrays), "a workspace that is no array of bytes"
            assert place % 256 == 0

    def _check_counter(self, address: int, block: Block, launch: Launch) -> None:
        streams = self.counters.setdefault((address, block.life), set())
        streams.add((launch.device, launch.stream))
        assert len(streams) == 1, f"streams {streams} share a tile counter"
        self._use(block, "tile_counter", launch)
        assert (block.bytes[:4] == 0).all(), "a tile counter is not 0 before a launch"

    def _use(self, block: Block, name: str, launch: Launch) -> None:
        assert block.alive, f"{name}: memory that was given back"
        assert block.life == launch.lives.get(block), f"{name}: memory that is somebody else's now"
        assert block.device == launch.device, f"{name}: memory of device {block.device}"
        if block.inside:
            assert block.stream == launch.stream, (
                f"{name}: the library allocated it on stream {block.stream:#x}, whose next array "
                f"may be given it while stream {launch.stream:#x} works"
            )
        self.used.setdefault(block, set()).add(name)


def _pointers(parameters: Any) -> dict[str, int]:
    """Numbers that may be addresses, by name: of the structure, and of its features' blocks."""
    found = {}
    for name, (kind, _) in fields_of(parameters.dtype).items():
        if kind.names is None:
            found[name] = int(parameters[name]) if kind.kind in "ui" else 0
        elif kind not in (*STRIDED, TENSOR_MAP):
            found |= {k: int(parameters[name][k]) for k in kind.names if kind[k].kind in "ui"}
    return found


def _tensors(launch: Launch, plan: Plan) -> Iterator[_Tensor]:
    """Every tensor that the parameters of a launch describe."""
    problem, parameters = plan.problem, launch.parameters
    output = {"out": problem.output, "lse": problem.statistics, "dlse": problem.statistics}
    rows = (problem.batch, problem.seqlen_q, problem.heads_q)
    for name, (kind, _) in fields_of(parameters.dtype).items():
        field_of, short = parameters[name], name.removesuffix("_map")
        dtype = output.get(short, problem.storage)
        size = ELEMENTS[dtype].itemsize
        if kind == TENSOR_MAP:
            words = [int(word) for word in field_of["opaque"][:8]]
            sizes = (words[1], *words[2:5])
            yield _mapped(short, words, problem.shapes[short], sizes, dtype)
        elif kind in (TENSOR, ROW_VECTOR):
            address = int(field_of["data"])
            strides = [size * int(field_of[f"{axis}_stride"]) for axis in ("batch", "row", "head")]
            if kind == TENSOR:
                yield _Tensor(name, address, problem.shapes[name], (*strides, size), dtype)
            elif address or name not in ("lse", "dlse"):
                yield _Tensor(name, address, rows, tuple(strides), dtype)


def _operands(parameters: Any, feature: str, operand: Operand) -> Iterator[_Tensor]:
    """A feature's array and its gradient, where a launch is told of them."""
    name, gradient, names = operand.name, f"d{operand.name}", parameters.dtype.names
    if feature in names:
        block = parameters[feature]
        own = block.dtype.names
        if block.dtype == PAIRS:
            strides = {axis: block[f"{axis}_stride"] for axis in _PAIR_AXES}
            yield _of_pairs(name, block["data"], operand, strides)
        elif f"{name}_map" in own:
            words = [int(word) for word in block[f"{name}_map"]["opaque"][:8]]
            entries, heads, rows, keys = operand.pairs
            sizes = (words[1], *words[2:5])
            yield _mapped(name, words, (entries, rows, heads, keys), sizes, operand.dtype)
        elif f"{name}_row_stride" in own:
            strides = {axis: block[f"{name}_{axis}_stride"] for axis in _PAIR_AXES}
            yield _of_pairs(name, block[name], operand, strides)
        elif name in own:
            yield _contiguous(name, block[name], operand)
    elif feature == "packed_lengths" and name in names:  # of what lists tiles
        yield _contiguous(name, parameters[name], operand)
    if gradient in names:
        field_of = parameters[gradient]
        if field_of.dtype == PAIRS:
            strides = {axis: field_of[f"{axis}_stride"] for axis in _PAIR_AXES}
            yield _of_pairs(gradient, field_of["data"], operand, strides)
        else:
            yield _contiguous(gradient, field_of, operand)


_PAIR_AXES = ("batch", "head", "row", "column")


def _of_pairs(name: str, address: Any, operand: Operand, strides: Mapping[str, Any]) -> _Tensor:
    """One that broadcasts: its strides are 0 where it has one element."""
    own = [ELEMENTS[operand.dtype].itemsize * int(strides[axis]) for axis in _PAIR_AXES]
    for axis, size, stride in zip(_PAIR_AXES, operand.pairs, own, strict=True):
        assert size > 1 or stride == 0, f"{name}: stride {stride} of one {axis}"
    return _Tensor(name, int(address), operand.pairs, tuple(own), operand.dtype)


def _contiguous(name: str, address: Any, operand: Operand) -> _Tensor:
    strides = tuple(_dense(operand.shape, ELEMENTS[operand.dtype].itemsize))
    return _Tensor(name, int(address), operand.shape, strides, operand.dtype)


def _mapped(
    name: str, words: list[int], shape: tuple[int, ...], sizes: tuple[int, ...], dtype: str
) -> _Tensor:
    """What a map describes: columns, rows, heads, batch."""
    batch, rows, heads, columns = shape
    assert sizes == (columns, rows, heads, batch), f"{name}: a map of {sizes} for {shape}"
    by_row, by_head, by_batch = words[5:8]
    strides = (by_batch, by_row, by_head, ELEMENTS[dtype].itemsize)
    return _Tensor(name, words[0], shape, strides, dtype)

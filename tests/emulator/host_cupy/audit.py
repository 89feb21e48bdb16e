"""Checks every launch: its parameters must describe existing arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from cuflash.cuda.parameters import STRIDED, TENSOR_MAP, fields_of
from cuflash.planning.kernel import KernelConfig
from cuflash.planning.plan import Plan
from cuflash.planning.problem import ELEMENTS

from .described import Axes, Tensor, axes_of, is_dense, operands_of, tensors_of
from .memory import Block
from .runtime import Launch, Runtime

__all__ = ["Auditor"]

#: Arrays of an append beside its matrices.
_LENGTHS = ("cache_seqlens", "rotary_seqlens", "lengths_after", "overflow")
_NUMBERS = (*_LENGTHS, "page_table", "cache_batch_idx", "rotary_cos", "rotary_sin")


def _joined(axes: Axes) -> Axes:
    """The same elements with as few axes as possible: heads and rows of a packed group are one."""
    joined: Axes = []
    for n, stride in sorted(axes, key=lambda axis: abs(axis[1])):
        if joined and stride == joined[-1][0] * joined[-1][1]:
            joined[-1] = joined[-1][0] * n, joined[-1][1]
        else:
            joined.append((n, stride))
    return joined


@dataclass
class Auditor:
    """Checks launches. ``plan`` is the plan of their pass, ``told`` holds plans of other passes.

    Attributes
    ----------
    used
        Blocks of memory that launches used, and how.
    counters
        Tile counters by address, with the streams of the launches that drew from each.
    """

    runtime: Runtime
    plan: Plan | None = None
    used: dict[Block, set[str]] = field(default_factory=dict)
    counters: dict[tuple[int, int], set[tuple[int, int]]] = field(default_factory=dict)
    told: dict[KernelConfig, Plan] = field(default_factory=dict)

    def tell(self, plan: Plan) -> None:
        """Say that the next launches belong to this plan."""
        self.plan = plan
        self.told |= {one.config: plan for one in plan.launches}

    def launch(self, launch: Launch) -> None:
        """Raise AssertionError unless all its parameters are right."""
        if launch.replayed and not self._is_planned(launch):
            self.plan = self.told.get(launch.config)
        assert self._is_planned(launch), "a launch that nobody was told of"
        assert self.plan is not None
        tensors = [t for t in tensors_of(launch, self.plan) if 0 not in t.shape]
        for tensor in tensors:
            self._check_tensor(tensor, launch)
            size = ELEMENTS[tensor.dtype].itemsize
            assert tensor.address % size == 0, f"{tensor.name}: elements that are not aligned"
        self._check_operands(launch)
        self._check_numbers(launch)
        self._check_alignment([t for t in tensors if len(t.shape) == 4], launch)
        self._check_workspace(launch)

    def _is_planned(self, launch: Launch) -> bool:
        return self.plan is not None and launch.config in [o.config for o in self.plan.launches]

    def _check_tensor(self, tensor: Tensor, launch: Launch) -> None:
        assert self.plan is not None
        if tensor.name in ("dq", "dk", "dv") and tensor.name[1:] not in self.plan.problem.wrt:
            self._check_scratch(tensor, launch)
        else:
            self._check_array(tensor, launch)

    def _check_array(self, tensor: Tensor, launch: Launch) -> None:
        assert self.plan is not None
        form = _joined if self.plan.problem.group_rows > 1 else list
        same = [
            array
            for array in list(self.runtime.ndarray.living)
            if array.data.ptr == tensor.address
            and array.dtype.name == tensor.dtype
            and form(axes_of(array.shape, array.strides)) == form(tensor.axes)
        ]
        where = f"{launch.config.entry}: {tensor.name} at {tensor.address:#x}, {tensor.dtype}"
        assert same, f"{where}: no array of shape {tensor.shape}, strides {tensor.strides} is there"
        self._use(same[0].data.block, tensor.name, launch)

    def _check_operands(self, launch: Launch) -> None:
        """Check that arrays of features and their gradients exist, as planned."""
        assert self.plan is not None
        every = [(use, operand) for use in self.plan.problem.uses for operand in use.operands]
        for use, operand in every:
            for tensor in operands_of(launch.parameters, use.feature, operand):
                if 0 not in operand.shape:
                    self._check_array(tensor, launch)

    def _check_numbers(self, launch: Launch) -> None:
        """Check that lengths and tables of an append are existing arrays."""
        pointers = _pointers(launch.parameters) if launch.config.kernel == "append_kv" else {}
        for name in [name for name in _NUMBERS if pointers.get(name)]:
            same = [a for a in list(self.runtime.ndarray.living) if a.data.ptr == pointers[name]]
            assert same, f"{name}: no array at {pointers[name]:#x}"
            self._use(same[0].data.block, name, launch)

    def _check_scratch(self, tensor: Tensor, launch: Launch) -> None:
        """Check that an unrequested gradient lies in the workspace, after the plan's parts."""
        assert self.plan is not None
        block = self.runtime.memory.at(tensor.address)
        assert block is not None, f"{tensor.name} is nowhere"
        nbytes = math.prod(tensor.shape) * ELEMENTS[tensor.dtype].itemsize
        assert is_dense(tensor), f"{tensor} has gaps, or overlaps itself"
        assert block.holds(tensor.address, nbytes), f"{tensor.name} has no room"
        assert tensor.address % 256 == 0
        behind = [tensor.address - start for start in self._bytes_of(block, tensor.name)]
        assert any(place >= self.plan.workspace_bytes for place in behind), tensor.name
        self._use(block, "workspace", launch)

    def _check_alignment(self, matrices: list[Tensor], launch: Launch) -> None:
        claimed = launch.config.copies != "element"
        for tensor in matrices:
            assert not claimed or tensor.is_vector, (
                f"{launch.config.entry}: {launch.config.copies} copies of {tensor}"
            )

    def _check_workspace(self, launch: Launch) -> None:
        """Check that every part has its room at its offset in one workspace."""
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
            block = self.runtime.memory.at(place)
            assert block is not None, "a workspace that begins nowhere"
            assert place in self._bytes_of(block, "a workspace"), (
                "a workspace within others' memory"
            )
            assert place % 256 == 0

    def _bytes_of(self, block: Block, name: str) -> list[int]:
        """Where memory of bytes begins: arrays of bytes, or an allocation that no array has."""
        arrays = [a for a in self.runtime.ndarray.living if a.data.block is block]
        for other in arrays:
            assert other.dtype == "uint8", f"{name} in the memory of an array"
        return [array.data.ptr for array in arrays] or [block.address]

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
    """Numbers that may be addresses, by name, from the structure and its features' blocks."""
    found = {}
    for name, (kind, _) in fields_of(parameters.dtype).items():
        if kind.names is None:
            found[name] = int(parameters[name]) if kind.kind in "ui" else 0
        elif kind not in (*STRIDED, TENSOR_MAP):
            found |= {k: int(parameters[name][k]) for k in kind.names if kind[k].kind in "ui"}
    return found

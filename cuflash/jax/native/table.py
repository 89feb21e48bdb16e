"""A launch table: all data of a pass that the handler needs, for every device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...addresses import multiples_of
from ...caches.planned import CachePlan
from ...cuda.launch import PreparedPlan
from ...cuda.prepared_kernel import PreparedKernel
from ...errors import UnsupportedError
from ...pipeline import CallPlan
from .layout import ARGUMENT, NOTHING, RESULT, WORKSPACE, Device, Kernel, Table, Tensor
from .limits import MOST_TENSORS, MOST_TEXT
from .registry import as_text

__all__ = ["DevicePart", "LaunchTable"]


@dataclass(frozen=True)
class DevicePart:
    """One device of a table.

    Attributes
    ----------
    planned
        The plan of the pass on the device.
    context
        Address of the driver's context of the device.
    counter
        An array of one tile counter that is 0; None if no kernel draws tiles.
    """

    planned: CallPlan | CachePlan
    context: int
    counter: Any


class LaunchTable:
    """The words, in memory that does not move.

    Parameters
    ----------
    arguments, results
        Names of the arguments and results of the call, in order.
    devices
        The parts of the devices, with the same tensors.
    driver
        Addresses of the driver's functions, in the order of ``layout.Driver``.
    has_stream
        Whether XLA has a stream: on the CPU it has none.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        results: Sequence[str],
        devices: Sequence[DevicePart],
        driver: Sequence[int],
        has_stream: bool = True,
    ) -> None:
        self._words: list[int] = [0] * len(Table)
        first = devices[0].planned
        has_workspace = any(part.planned.workspace_bytes for part in devices)
        self._set(Table.arguments, len(arguments))
        self._set(Table.results, len(results) + has_workspace)
        self._set(Table.has_workspace, int(has_workspace))
        self._set(Table.has_stream, int(has_stream))
        told = f"cuflash: {first.plan}"
        self._set(Table.wrong_call, self._text(f"{told}: a call of other arguments, in number "))
        self._set(Table.no_stream, self._text(f"{told}: XLA's stream cannot be used: CUDA error "))
        self._set(
            Table.no_device,
            self._text(f"{told}: compiled for other devices than XLA runs it on: CUDA error "),
        )
        self._set(Table.driver, self._add([*driver]))
        self._arguments, self._results = [*arguments], [*results]
        records = [word for part in devices for word in self._device(part)]
        self._set(Table.device_count, len(devices))
        self._set(Table.devices, self._add(records))
        self._kept = devices
        self.words: npt.NDArray[np.int64] = np.array(self._words, np.uint64).view(np.int64)

    @property
    def address(self) -> int:
        """Address of the words."""
        return int(self.words.ctypes.data)

    def _set(self, field: Table, value: int) -> None:
        self._words[field] = value

    def _add(self, words: Sequence[int]) -> int:
        """Append words, and return their place."""
        place = len(self._words)
        self._words += [word % (1 << 64) for word in words]
        return place

    def _text(self, text: str) -> int:
        """Append a message (number of words, the words, number of bytes); return its place."""
        said = text.encode()[-(MOST_TEXT - 32) :]  # leaves space for the number after it
        words = [int(word) for word in as_text(said).view(np.uint64)]
        return self._add([len(words), *words, len(said)])

    def _tensors(self, planned: CallPlan | CachePlan) -> int:
        """Append the records of the plan's tensors, and return their place."""
        multiples, records = _multiples_of(planned), []
        for name, spec in planned.tensors.items():
            kind, number = NOTHING, 0  # a tensor without elements may have no memory
            if 0 not in spec.shape and name in self._results:  # also if it is written in place
                kind, number = RESULT, self._results.index(name)
            elif 0 not in spec.shape:
                kind, number = ARGUMENT, self._arguments.index(name)
            said = f"cuflash: {planned.plan}: {name} is at no multiple of {multiples[name]}: at "
            records += [kind, number, multiples[name] - 1, self._text(said)]
        for offset in planned.scratch.values():
            records += [WORKSPACE, offset, 0, 0]
        if len(records) > len(Tensor) * MOST_TENSORS:
            raise UnsupportedError(f"a call of more than {MOST_TENSORS} arrays under jax.jit")
        return self._add(records)

    def _device(self, part: DevicePart) -> list[int]:
        planned = part.planned
        steps = _steps_of(planned)
        counter = 0 if part.counter is None else int(part.counter.data.ptr)
        record = {Device.context: part.context, Device.counter: counter, Device.owner: 0}
        count = len(planned.tensors) + len(planned.scratch)
        record[Device.tensor_count], record[Device.tensors] = count, self._tensors(planned)
        offset = planned.launcher.counter_offset if steps else None
        record[Device.counter_offset] = -1 if offset is None else offset
        records = []
        for launcher, places in steps:
            number_of = dict(zip(launcher.names, places, strict=True))
            told = f"cuflash: {launcher.plan}"
            records += [self._kernel(told, one, number_of) for one in launcher.launches]
        record[Device.kernel_count] = len(records)
        record[Device.kernels] = self._add([word for words in records for word in words])
        said = f"cuflash: {planned.plan}: the counter of tiles cannot be set: CUDA error "
        record[Device.failed_counter] = self._text(said)
        return [record[field] for field in Device]

    def _kernel(self, told: str, kernel: PreparedKernel, number_of: Mapping[str, int]) -> list[int]:
        places, told = kernel.places, f"{told}: {kernel.name}"
        grid, _, _, threads, _, _, shared_bytes = kernel.shape
        given = [(word, number_of[name]) for word, name in places.tensors if name in number_of]
        maps = [word for one in places.maps for word in self._map(told, one, number_of)]
        record = {
            Kernel.function: kernel.handle,
            Kernel.grid: grid,
            Kernel.threads: threads,
            Kernel.shared_bytes: shared_bytes,
            Kernel.overlaps: int(kernel.overlaps),
            Kernel.words: len(kernel.template),
            Kernel.template: self._add([*map(int, kernel.template)]),
            Kernel.pointer_count: len(given),
            Kernel.pointers: self._add([word for patch in given for word in patch]),
            Kernel.part_count: len(places.workspace),
            Kernel.parts: self._add([word for patch in places.workspace for word in patch]),
            Kernel.map_count: len(places.maps),
            Kernel.maps: self._add(maps),
            Kernel.counter_word: -1 if places.counter is None else places.counter,
            Kernel.refused: self._text(f"{told}: the launch was refused: CUDA error "),
        }
        return [record[field] for field in Kernel]

    def _map(self, told: str, one: tuple[int, str, Any], number_of: Mapping[str, int]) -> list[int]:
        word, name, encoder = one
        *modes, words = encoder.arguments
        refused = self._text(f"{told}: the tensor map of {name} was refused: CUDA error ")
        return [word, number_of[name], *modes, *map(int, words), refused]


def _multiples_of(planned: CallPlan | CachePlan) -> Mapping[str, int]:
    """Return the required alignment of the address of every tensor."""
    return planned.multiples if isinstance(planned, CachePlan) else multiples_of(planned)


def _steps_of(planned: CallPlan | CachePlan) -> Sequence[tuple[PreparedPlan, Sequence[int]]]:
    """Return the steps in order, with the numbers of the tensors of each step."""
    if isinstance(planned, CachePlan):
        return planned.launcher.steps
    if planned.plan.problem.empty:
        return ()
    return ((planned.launcher, range(len(planned.launcher.names))),)

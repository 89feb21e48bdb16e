"""Records what a public function does on the device, without addresses; computes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cuflash import ScoreMod
from cuflash.cuda.parameters import STRIDED, TENSOR_MAP, fields_of

from ..emulator.host_cupy import HostCupy
from ..emulator.host_cupy.memory import Block
from ..emulator.host_cupy.runtime import Launch

__all__ = ["Teller", "no_kernel"]

#: Launches, other queued work, and results; equal if two calls do the same.
Told = tuple[Any, ...]


def no_kernel(config: Any) -> Callable[..., None]:
    """A stand-in for a compiled kernel; it does nothing."""
    return lambda *numbers: None


class Teller:
    """Makes calls on a stand-in of CuPy, and records what each of them did."""

    def __init__(self, host: HostCupy) -> None:
        self.host = host
        self._launches: list[Launch] = []
        audit = host.runtime.audit
        host.runtime.audit = lambda launch: (self._launches.append(launch), audit(launch))

    def call(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Told:
        """The actions of a call, or its refusal."""
        self._launches.clear()
        names = self._names(arguments)
        try:
            results = self.host.call(function, **arguments)
        except Exception as error:  # a refusal, or a failure of the audit
            if isinstance(error, AssertionError):
                raise
            return ("refused", type(error).__name__, re.sub(r"0x\w+", "there", str(error)))
        return self.told(names, results)

    def told(self, names: dict[Block, str], results: Any) -> Told:
        """The actions since the last call began."""
        results = results if isinstance(results, tuple) else (results,)
        arrays = [array for array in results if hasattr(array, "strides")]
        for i, array in enumerate(arrays):
            names.setdefault(array.data.block, f"result {i}")
        launches = tuple(self._launch(launch, names) for launch in self._launches)
        queue = self.host.runtime.queue
        queued = tuple(
            (q.what, q.device, q.stream, *(names.get(block, "internal") for block in q.blocks))
            for q in queue
            if [b.nbytes for b in q.blocks] != [4]  # a tile counter, which stays for later calls
        )
        made = tuple(
            (names[a.data.block], a.shape, a.dtype.name, a.strides, a.data.device_id)
            for a in arrays
        )
        return launches, queued, made

    def _names(self, arguments: Mapping[str, Any]) -> dict[Block, str]:
        names = {}
        for name, value in arguments.items():
            several = value.parts[1] if isinstance(value, ScoreMod) else value
            for i, array in enumerate(several if isinstance(several, tuple) else (several,)):
                if isinstance(array, self.host.runtime.ndarray):
                    names[array.data.block] = f"{name}[{i}]"
        return names

    def _launch(self, launch: Launch, names: Mapping[Block, str]) -> Told:
        def place(address: int) -> Any:
            block = self.host.runtime.memory.at(address)
            if block is None:
                return address
            return names.get(block, "internal"), address - block.address

        told: list[Any] = [launch.config, launch.grid, launch.device, launch.stream]
        for name, (kind, _) in fields_of(launch.parameters.dtype).items():
            value = launch.parameters[name]
            if kind == TENSOR_MAP:
                told.append((name, place(int(value["opaque"][0])), *map(int, value["opaque"][1:])))
            elif kind in STRIDED:
                strides = [int(value[axis]) for axis in (kind.names or ())[1:]]
                told.append((name, place(int(value["data"])), *strides))
            elif kind == np.uint64:
                told.append((name, place(int(value))))
            elif name in [feature.name for feature in launch.config.features]:
                inner = fields_of(kind)
                addresses = [field for field, (of, _) in inner.items() if of == np.uint64]
                told.append((name, *(place(int(value[field])) for field in addresses)))
                maps = [field for field, (of, _) in inner.items() if of == TENSOR_MAP]
                every = [value[field]["opaque"] for field in maps]
                told += [(name, place(int(words[0])), *map(int, words[1:])) for words in every]
                numbers = [field for field in inner if field not in (*addresses, *maps)]
                told.append((name, *(value[field].tobytes() for field in numbers)))
            else:
                told.append((name, value.tobytes()))
        return tuple(told)

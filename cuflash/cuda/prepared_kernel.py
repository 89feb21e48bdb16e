"""Kernels with everything decided except the addresses, and their launches."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .tensor_map import WORDS, TensorMapEncoder

__all__ = ["Launch", "Launches", "Overlapping", "Places", "PreparedKernel"]

#: Bytes of a word.
_WORD = 8

#: First word, tensor and encoder of every tensor map of a kernel.
Maps = tuple[tuple[int, str, TensorMapEncoder], ...]

#: A launch that has its arguments. It returns CUDA's error or None, or raises CuPy's error.
Launch = Callable[[], int | None]

#: Makes a launch that may begin while the previous kernel runs, of a kernel, its sizes, the stream
#: and the address of the addresses of the parameters.
Overlapping = Callable[[int, tuple[int, ...], int, int], Launch]


class Launches(NamedTuple):
    """The launches of some kernels with the same addresses. Immutable: threads share them."""

    every: tuple[Launch, ...]
    parameters: tuple[_Parameters, ...]  # the driver reads them, so they live as long


@dataclass(frozen=True)
class Places:
    """The words (of 64 bits) of a kernel's parameters that differ from launch to launch."""

    maps: Maps
    tensors: tuple[tuple[int, str], ...]  # word of a pointer, its tensor in the call
    workspace: tuple[tuple[int, int], ...]  # word of a pointer, its offset in the workspace
    counter: int | None  # word of the tile counter's pointer


class _Parameters(NamedTuple):
    """The parameters of one launch, as the driver takes them. Immutable: threads share them."""

    words: npt.NDArray[np.uint64]  # the structure, then the structure's own address
    address: int  # address of the last word: the driver takes a list of pointers to parameters


@dataclass(frozen=True)
class PreparedKernel:
    """A kernel of a plan, with everything decided except the addresses."""

    name: str
    handle: int
    shape: tuple[int, ...]  # grid, block, bytes of shared memory: as the driver takes them
    template: npt.NDArray[np.uint64]  # the parameters' values that are the same in every launch
    places: Places  # positions of the other values
    overlaps: bool = False  # it may begin while the previous kernel still runs

    def parameters(self, pointers: Mapping[str, int], workspace: int, counter: int) -> _Parameters:
        """The parameters of launches with these addresses; an absent tensor is at 0."""
        room: Any = self._room.from_buffer_copy(self._initial)
        words, places = np.frombuffer(room, np.uint64), self.places
        for word, name, encoder in places.maps:
            encoder.write(pointers.get(name, 0), words[word : word + WORDS])
        for word, name in places.tensors:
            words[word] = pointers.get(name, 0)
        for word, offset in places.workspace:
            words[word] = workspace + offset
        if places.counter is not None:
            words[places.counter] = counter
        words[-1] = start = ctypes.addressof(room)  # quicker than NumPy's way to the address
        return _Parameters(words, start + ctypes.sizeof(room) - _WORD)

    @functools.cached_property
    def _room(self) -> type[ctypes.Array[ctypes.c_uint64]]:
        """Memory for the template, and the word after it."""
        return ctypes.c_uint64 * (len(self.template) + 1)

    @functools.cached_property
    def _initial(self) -> bytes:
        return self.template.tobytes() + bytes(_WORD)

    def launch(
        self, parameters: _Parameters, stream: int, driver: Any, overlapping: Overlapping | None
    ) -> Launch:
        """A launch on a stream; the caller keeps the parameters as long.

        ``driver`` is CuPy's module. Without ``overlapping`` no kernel begins early.
        """
        if self.overlaps and overlapping is not None:
            return overlapping(self.handle, self.shape, stream, parameters.address)
        return functools.partial(
            driver.launchKernel, self.handle, *self.shape, stream, parameters.address, 0
        )

"""Descriptions of tensors for Hopper's copy engine: ``CUtensorMap`` of the CUDA driver.

CUDA Driver API, Tensor Map Object Management: ``cuTensorMapEncodeTiled``.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import LaunchError
from ..planning.problem import ElementName

__all__ = ["WORDS", "TensorMapEncoder"]

#: The number of 64-bit words of a map.
WORDS = 16

_PANEL = 128  # bytes of a row of a box: the span of the widest swizzle
#: CUtensorMapDataType, and the size in bytes.
_TYPES: dict[str, tuple[int, int]] = {
    "uint8": (0, 1),
    "float16": (6, 2),
    "float32": (7, 4),
    "bfloat16": (9, 2),
}
#: CUtensorMapSwizzle and CUtensorMapL2promotion, by bytes of a row of a box.
_SWIZZLES = {64: 0, 128: 3}
_PROMOTE_L2_128B, _PROMOTE_L2_256B = 2, 3
_KEPT = 256  # kept maps of one tensor
_ENOUGH = 4  # driver-made maps that show which word holds the address


@functools.cache
def _driver() -> Any:
    function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    function.restype = ctypes.c_int
    return function


def _encode() -> Any:
    """The driver's function, once the calling thread has a context (CUDA: cudaSetDevice)."""
    import cupy

    cupy.cuda.runtime.setDevice(cupy.cuda.runtime.getDevice())
    return _driver()


def address_word(maps: Mapping[int, npt.NDArray[np.uint64]]) -> int | None:
    """The index of the address in maps, if nothing else differs between them; else None."""
    words = np.array([*maps.values()])
    (differing,) = np.nonzero((words != words[0]).any(axis=0))
    if len(differing) != 1 or [*words[:, differing[0]]] != [*maps]:
        return None
    return int(differing[0])


class TensorMapEncoder:
    """Makes the maps of one tensor of a call; only its address varies.

    Parameters
    ----------
    dtype
        "float16", "bfloat16", "float32" or "uint8".
    shape
        (batch, rows, heads, columns).
    strides
        In elements: (batch, row, head). The stride of an axis longer than 1 is positive and a
        multiple of 16 bytes.
    rows
        Rows of a box; its columns are 128 bytes, or 64 for byte tensors of no more columns.

    Notes
    -----
    A box reads zeros beyond the tensor. Maps are kept by address. The driver makes the first few.
    If these differ only in one word, and that word is the address, later maps of equally aligned
    addresses are copies with that word replaced.
    """

    def __init__(
        self,
        dtype: ElementName,
        shape: tuple[int, int, int, int],
        strides: tuple[int, int, int],
        rows: int,
    ) -> None:
        batch, seqlen, heads, columns = shape
        sizes = (columns, seqlen, heads, batch)
        outer = (strides[1], strides[2], strides[0])
        # An axis of one element may have any stride; a legal one replaces it.
        self._type, itemsize = _TYPES[dtype]
        spans = [itemsize * s if n > 1 else 16 for n, s in zip(sizes[1:], outer, strict=True)]
        self._sizes = (ctypes.c_uint64 * 4)(*sizes)
        self._strides = (ctypes.c_uint64 * 3)(*spans)
        panel = _PANEL // 2 if itemsize == 1 and columns <= _PANEL // 2 else _PANEL
        self._swizzle = _SWIZZLES[panel]
        # A row of a uint8 tensor rarely has more than 128 bytes, and another head's row follows it.
        self._promotion = _PROMOTE_L2_128B if itemsize == 1 else _PROMOTE_L2_256B
        self._box = (ctypes.c_uint32 * 4)(panel // itemsize, rows, 1, 1)
        self._steps = (ctypes.c_uint32 * 4)(1, 1, 1, 1)
        self._kept: dict[int, npt.NDArray[np.uint64]] = {}
        self._shown: dict[int, npt.NDArray[np.uint64]] = {}
        self._address_word: int | None = None
        self._alignment = 0  # of the addresses of those first maps
        self._base = np.zeros(WORDS, np.uint64)  # one of those maps

    @property
    def arguments(self) -> tuple[int, int, int, npt.NDArray[np.uint64]]:
        """The driver's arguments besides the address.

        They are the type, the modes of the swizzle and of the promotion into L2, and
        the words of sizes, strides, box and steps in turn.
        """
        arrays = self._sizes, self._strides, self._box, self._steps
        words = np.frombuffer(b"".join(bytes(array) for array in arrays), np.uint64)
        return self._type, self._swizzle, self._promotion, words

    def map_of(self, address: int) -> npt.NDArray[np.uint64]:
        """The map of a tensor at a device address, as the driver makes it: :data:`WORDS` words.

        Raises
        ------
        LaunchError
            If the driver refuses it.
        """
        found = self._kept.get(address)
        if found is None:
            found = self._make(address)
            self._learn(address, found)
            if len(self._kept) >= _KEPT:
                self._kept = {}  # a new dictionary: other threads may be reading the old one
            self._kept[address] = found
        return found

    def write(self, address: int, to: npt.NDArray[np.uint64]) -> None:
        """Write the map of an address to ``to``; without the driver if possible.

        Raises
        ------
        LaunchError
            If the driver refuses it.
        """
        word = self._address_word
        if word is not None and address % self._alignment == 0:
            to[:] = self._base
            to[word] = address
        else:
            to[:] = self.map_of(address)

    def _learn(self, address: int, words: npt.NDArray[np.uint64]) -> None:
        if len(self._shown) == _ENOUGH:
            return
        self._shown = {**self._shown, int(address): words}
        if len(self._shown) == _ENOUGH:
            every = functools.reduce(int.__or__, self._shown)
            self._alignment, self._base = every & -every, words
            self._address_word = address_word(self._shown)

    def _make(self, address: int) -> npt.NDArray[np.uint64]:
        room = np.zeros(WORDS + 8, np.uint64)  # the driver wants 64-byte alignment
        start = (-room.ctypes.data % 64) // 8
        words = room[start : start + WORDS]
        status = _encode()(
            ctypes.c_void_p(words.ctypes.data),
            self._type,
            4,
            ctypes.c_void_p(int(address)),
            self._sizes,
            self._strides,
            self._box,
            self._steps,
            0,  # not interleaved
            self._swizzle,
            self._promotion,
            0,  # zeros outside
        )
        if status:
            raise LaunchError(
                f"the driver refused a tensor map of {[*self._sizes]} elements, strides "
                f"{[*self._strides]} bytes, at {address:#x}: CUDA error {status}"
            )
        return words

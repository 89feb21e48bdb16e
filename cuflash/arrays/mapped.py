"""Finds the bytes of a file that an address is mapped to: a file may be mapped at two addresses."""

from __future__ import annotations

import bisect
import mmap
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Mappings"]

#: Linux's list of the mappings of this process (manual page proc_pid_maps).
_MAPS = Path("/proc/self/maps")
#: A line for a mapping of a file; other memory has inode 0.
_LINE = re.compile(r"^(\w+)-(\w+) .(...) (\w+) (\S+) ([1-9]\d*)", re.MULTILINE)


class _Mapping(NamedTuple):
    """A range of addresses to which a file is mapped."""

    start: int
    end: int
    writes: bool  # whether writes are allowed and reach the file
    position: int  # of ``start`` in the file
    file: tuple[int | str, ...]


class Mappings:
    """The mappings of files in this process, looked up when first needed.

    On Linux these are all mappings in the kernel's list; elsewhere those that :class:`numpy.memmap`
    made.
    """

    def __init__(self) -> None:
        self._listed: list[_Mapping] | None = None
        self._read = False

    def same_file(
        self, a: np.ndarray[Any, Any], place_a: int, b: np.ndarray[Any, Any], place_b: int
    ) -> tuple[int, int] | None:
        """Two addresses as positions in the file to which both are mapped; None if there is none.

        The result is also None if neither mapping changes the file, because both are read-only or
        private (mode ``"c"`` of a memmap). A private mapping beside one that changes the file
        counts as the same memory, because it may show what is written to the file.

        Parameters
        ----------
        a, b
            The arrays.
        place_a, place_b
            Addresses of their lowest bytes.
        """
        roots = _root(a), _root(b)
        if any(root.flags.owndata for root in roots):  # memory that NumPy owns belongs to no file
            return None
        one, other = self._find(roots[0], place_a), self._find(roots[1], place_b)
        if one is None or other is None or one.file != other.file:
            return None
        if not (one.writes or other.writes):
            return None
        return (
            one.position + place_a - one.start,
            other.position + place_b - other.start,
        )

    def _find(self, root: np.ndarray[Any, Any], place: int) -> _Mapping | None:
        if not self._read:
            self._listed, self._read = _listed(), True
        if self._listed is None:
            return _of_memmap(root)
        index = bisect.bisect_right(self._listed, place, key=lambda mapping: mapping.start) - 1
        found = self._listed[index] if index >= 0 else None
        return found if found is not None and place < found.end else None


def _root(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array at the end of a chain of views."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _listed() -> list[_Mapping] | None:
    """The mappings of files by address, as Linux lists them; None on other systems."""
    try:
        text = _MAPS.read_text("utf-8", "surrogateescape")
    except OSError:
        return None
    if "w-s " not in text and "wxs " not in text:  # no file can be changed
        return []
    return [_mapping(*found) for found in _LINE.findall(text)]


def _mapping(start: str, end: str, mode: str, position: str, device: str, inode: str) -> _Mapping:
    file = (device, inode)
    writes = mode[0] == "w" and mode[-1] == "s"
    return _Mapping(int(start, 16), int(end, 16), writes, int(position, 16), file)


def _of_memmap(root: np.ndarray[Any, Any]) -> _Mapping | None:
    """The mapping of a memmap, from the memmap's own attributes."""
    if not isinstance(root, np.memmap) or root.filename is None:
        return None
    try:
        status = os.stat(root.filename)
    except OSError:  # the file is gone; another one may have its name
        file: tuple[int | str, ...] = (str(root.filename),)
    else:
        file = (status.st_dev, status.st_ino)
    held: Any = root.base  # the mmap
    pages = np.frombuffer(held, np.uint8)
    start, position = pages.ctypes.data, root.offset - root.offset % mmap.ALLOCATIONGRANULARITY
    return _Mapping(start, start + pages.size, root.mode in ("r+", "w+"), position, file)

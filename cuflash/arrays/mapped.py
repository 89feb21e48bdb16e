"""Which bytes of which file host memory is: a file can be mapped at two addresses."""

from __future__ import annotations

import bisect
import mmap
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Mappings"]

#: What Linux says of the mappings of this process (manual page proc_pid_maps).
_MAPS = Path("/proc/self/maps")
#: A line of a mapping of a file; those of other memory have inode 0.
_LINE = re.compile(r"^(\w+)-(\w+) .(...) (\w+) (\S+) ([1-9]\d*)", re.MULTILINE)


class _Mapping(NamedTuple):
    """A range of addresses that shows a file."""

    start: int
    end: int
    writes: bool  # whether it can be written, and that reaches the file
    position: int  # in the file, of ``start``
    file: tuple[int | str, ...]


class Mappings:
    """The mappings of files in this process, looked up when first needed.

    On Linux those that the kernel lists, whoever made them; elsewhere those
    that :class:`numpy.memmap` made.
    """

    def __init__(self) -> None:
        self._listed: list[_Mapping] | None = None
        self._read = False

    def same_file(
        self, a: np.ndarray[Any, Any], place_a: int, b: np.ndarray[Any, Any], place_b: int
    ) -> tuple[int, int] | None:
        """Two addresses as positions in the one file that both show; None if there is none.

        There is none either if neither mapping changes the file, because both
        are read-only or private (mode ``"c"`` of a memmap). A private one beside
        one that changes the file counts as the same memory: it may show what is
        written to the file.

        Parameters
        ----------
        a, b
            The arrays.
        place_a, place_b
            Addresses of their lowest bytes.
        """
        roots = _root(a), _root(b)
        if any(root.flags.owndata for root in roots):  # memory of NumPy's own is no file's
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
    """The array that another is a view of, in the end."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _listed() -> list[_Mapping] | None:
    """The mappings of files by address, as Linux lists them; None where it is not Linux."""
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
    """The mapping that a memmap made, from what it remembers."""
    if not isinstance(root, np.memmap) or root.filename is None:
        return None
    try:
        status = os.stat(root.filename)
    except OSError:  # it is gone; its name may be another file's by now
        file: tuple[int | str, ...] = (str(root.filename),)
    else:
        file = (status.st_dev, status.st_ino)
    held: Any = root.base  # the mmap
    pages = np.frombuffer(held, np.uint8)
    start, position = pages.ctypes.data, root.offset - root.offset % mmap.ALLOCATIONGRANULARITY
    return _Mapping(start, start + pages.size, root.mode in ("r+", "w+"), position, file)

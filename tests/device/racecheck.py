"""Reports of compute-sanitizer's racecheck, and those known not to be races.

The load role of FlashAttention-3's backward pass copies lse and delta of the next rows over those
that math has read (``bulk_load``). A named barrier orders the two: every warp of math arrives there
after its reads, and load waits there. Racecheck sees this order only if a warp meets no other named
barrier between its wait for lse and delta and that arrival. Warps that clear dead queries or
exchange weights do meet another. Racecheck also reports a kernel of two dozen lines with such a
barrier, and does not report it without the barrier. Reads in ``fa3/backward_*.cuh`` against that
copy are therefore set aside, and so are reads of the kernel whose line the compiler has lost; no
other race is. Planted bugs test this one order instead ("Q is loaded before the one before is read"
in ``tests/mutants/fa3_backward.py``, and similar ones).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["Access", "Race", "Verdict", "judge"]

KERNEL = "cuflash_fa3_backward"
COPY = "cuflash::ptx::bulk_load("
WRITE = PurePosixPath("ptx/bulk_copy.cuh")
_FA3 = Path(__file__).parents[2] / "cuda_src" / "fa3"
READS = [PurePosixPath("fa3", path.name) for path in sorted(_FA3.glob("backward_*.cuh"))]

_PREFIX = "========="
_ACCESS = r"(Read|Write) access at (.+)\+0x[0-9a-f]+(?: in (.+):(\d+))?"
_FIRST = re.compile(rf"{_PREFIX} \w+: Race reported between {_ACCESS}\s*")
_SECOND = re.compile(rf"{_PREFIX}\s+and {_ACCESS} \[\d+ hazards?\]\s*")
_SUMMARY = re.compile(rf"{_PREFIX} RACECHECK SUMMARY: (\d+) hazards? displayed\b.*")


@dataclass(frozen=True)
class Access:
    """One side of a race."""

    kind: str  # Read, Write
    function: str  # the innermost function; the kernel, without line information
    file: str  # with or without folders; empty without line information
    line: int

    def is_in(self, files: Sequence[PurePosixPath]) -> bool:
        """Whether it is in one of ``files``; each of them has a folder."""
        here = PurePosixPath(self.file)
        return any(
            here.name == file.name and here.parent.name in ("", file.parent.name) for file in files
        )

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.file else "an unknown line"
        return f"{self.kind.lower()} of {self.function} at {place}"


@dataclass(frozen=True)
class Race:
    """Two accesses between which the tool sees no order."""

    one: Access
    other: Access

    @property
    def known(self) -> bool:
        """Whether it is of the kind that is known not to be a race."""
        read, write = sorted((self.one, self.other), key=lambda access: access.kind)
        copied = write.function.startswith(COPY) and write.is_in([WRITE])
        lost = read.function == KERNEL and not read.file
        by_math = lost or ("cuflash::fa3::" in read.function and read.is_in(READS))
        return (read.kind, write.kind) == ("Read", "Write") and copied and by_math


@dataclass(frozen=True)
class Verdict:
    """The result of reading a report."""

    known: int  # races set aside
    faults: tuple[str, ...]  # a line for everything else


def judge(text: str) -> Verdict:
    """Read the output of racecheck. A line that it does not understand is a fault."""
    races: list[Race] = []
    faults: list[str] = []
    seconds: list[int] = []  # the number of second accesses of every report
    displayed, first = 0, None
    for line in text.splitlines():
        if begins := _FIRST.fullmatch(line):
            seconds.append(0)
            first = _access(begins)
        elif (goes_on := _SECOND.fullmatch(line)) and first:
            seconds[-1] += 1
            races.append(Race(first, _access(goes_on)))
        elif said := _SUMMARY.fullmatch(line):
            displayed += int(said[1])
        elif _says_something(line):
            faults.append(line)
    faults += dict.fromkeys(f"{race.one}, {race.other}" for race in races if not race.known)
    faults += _missing(text, seconds, displayed)
    return Verdict(sum(race.known for race in races), tuple(faults))


def _access(found: re.Match[str]) -> Access:
    kind, function, file, line = found.groups()
    return Access(kind, function, file or "", int(line or 0))


def _says_something(line: str) -> bool:
    """Whether a line is more than the tool's name, an empty line or a caller in a report."""
    if not line.startswith(_PREFIX):
        return False
    rest = line[len(_PREFIX) :]
    return "access at" in rest or not (rest.startswith("  ") or rest.strip() in _NEUTRAL)


_NEUTRAL = ("", "COMPUTE-SANITIZER")


def _missing(text: str, seconds: list[int], displayed: int) -> list[str]:
    """The expected lines that are missing."""
    if not any(map(_SUMMARY.fullmatch, text.splitlines())):
        return ["there is no summary"]
    if displayed > len(seconds):
        return [f"the summary counts {displayed} hazards, {len(seconds)} were read"]
    return ["a report has only one access"] * (0 in seconds)

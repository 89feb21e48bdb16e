"""Registers, local memory and machine code of every kernel, as they were last accepted.

``python -m tests.compile.record`` builds the rows of some architectures with the installed NVRTC,
rewrites the record's lines for that version, and prints the differences. ``--only`` builds the rows
whose name matches a regular expression; the others keep their lines. The record keeps a hash of the
machine code. A changed hash needs a timing in ``bench/NOTES.md``. If the compiler warns about a
kernel, the warning is printed and nothing is written.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..architectures import LIMITS
from .nvrtc import build
from .rows import rare_rows, rows

__all__ = ["ANY", "RECORD", "Line", "Record", "nvrtc_version", "read"]

RECORD = Path(__file__).with_name("record.json")
#: Bytes of local memory that a kernel may use if the record of the running compiler lacks it. With
#: more, an accumulator lives in memory. The record has a few kernels above this limit.
ANY = 256


class Line(NamedTuple):
    """The compiler's numbers for a kernel."""

    registers: int
    local: int  # bytes of local memory
    code: str  # a hash of the machine code


@dataclass(frozen=True)
class Record:
    """The stored record: version of NVRTC -> name of a kernel -> the compiler's numbers."""

    versions: Mapping[str, Mapping[str, Line]]

    def allowed(self, name: str, version: str, rare: bool) -> int:
        """Bytes of local memory that a kernel may use; KeyError if the record must have it and has
        not."""
        if not rare and self.holds(name.split("-")[0], version):
            return self.versions[version][name].local
        return max(ANY, *(of[name].local for of in self.versions.values() if name in of), 0)

    def code(self, name: str, version: str) -> str | None:
        """The hash of a kernel's machine code; None where the record has no such line."""
        line = self.versions.get(version, {}).get(name)
        return None if line is None else line.code

    def holds(self, architecture: str, version: str) -> bool:
        """Whether the rows of an architecture are recorded for a version of NVRTC."""
        names = self.versions.get(version, {})
        return any(name.startswith(f"{architecture}-") for name in names)

    @property
    def names(self) -> set[str]:
        """The names of all kernels."""
        return {name for of in self.versions.values() for name in of}


def nvrtc_version() -> str:
    """The version of the running compiler."""
    from cupy.cuda import nvrtc

    return "{}.{}".format(*nvrtc.getVersion())


def read(path: Path = RECORD) -> Record:
    """The stored record."""
    stored: dict[str, dict[str, list[Any]]] = json.loads(path.read_text())
    versions: dict[str, dict[str, Line]] = {}
    for name, by_version in stored.items():
        for version, line in by_version.items():
            versions.setdefault(version, {})[name] = Line(*line)
    return Record(versions)


def write(path: Path, record: Record) -> None:
    """Write the record with one line for each kernel, so that diffs are short."""
    lines = []
    for name in sorted(record.names):
        by_version = {v: of[name] for v, of in sorted(record.versions.items()) if name in of}
        lines.append(f" {json.dumps(name)}: {json.dumps(by_version)}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The differences between two records, a line for each kernel."""
    changed = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return [f"{name}: {old.get(name, 'new')} -> {new.get(name, 'gone')}" for name in changed]


def main() -> int:
    """Build, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--architectures", nargs="+", default=["75", "80", "90"])
    parser.add_argument("--only", default="", help="part of a name, as a regular expression")
    parser.add_argument("--rare", action="store_true", help="what few calls ask for as well")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--into", type=Path, default=RECORD, help="another file to write")
    asked = parser.parse_args()
    old = read() if RECORD.exists() else Record({})
    version = nvrtc_version()
    wanted = {}
    for architecture in asked.architectures:
        wanted |= rare_rows(architecture) if asked.rare else {}
        wanted |= rows(architecture)
    wanted = {name: config for name, config in wanted.items() if re.search(asked.only, name)}
    with ThreadPoolExecutor(asked.jobs) as pool:
        built = dict(zip(wanted, pool.map(build, wanted.values()), strict=True))
    warnings = [f"{name}: {b.log}" for name, b in built.items() if b.warns]
    if warnings:
        print("\n".join(warnings))
        return 1
    known = {name for a in LIMITS for name in (rows(a) | rare_rows(a))}
    kept = old.versions.get(version, {})
    new = {name: line for name, line in kept.items() if name in known}
    new |= {name: Line(b.registers, b.local, b.code) for name, b in built.items()}
    print("\n".join(differences(kept, new)) or "nothing changed")
    write(asked.into, Record({**old.versions, version: new}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

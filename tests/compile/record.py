"""Registers and local memory of every kernel, as they were when they were last accepted.

``python -m tests.compile.record`` builds the rows of some architectures and
rewrites the record, printing what differs; with ``--only`` those whose name a
regular expression finds, and the others keep their lines. The compiler decides
much of it, so the record names the NVRTC it is of.
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
from typing import Any

from ..architectures import LIMITS
from .nvrtc import build
from .rows import rare_rows, rows

__all__ = ["ANY", "RECORD", "Record", "nvrtc_version", "read"]

RECORD = Path(__file__).with_name("record.json")
#: Bytes of local memory that a kernel may use which is in no record of the running compiler: more
#: is an accumulator that lives in memory. The few above it in the record are known.
ANY = 256


@dataclass(frozen=True)
class Record:
    """The stored account: name -> (registers, bytes of local memory)."""

    nvrtc: str
    kernels: Mapping[str, tuple[int, int]]

    def allowed(self, name: str, version: str, rare: bool) -> int:
        """Bytes of local memory that a kernel may use; KeyError if it has to be here and is not."""
        if version == self.nvrtc and not rare and self.holds(name.split("-")[0]):
            return self.kernels[name][1]
        return max(ANY, self.kernels.get(name, (0, 0))[1])

    def holds(self, architecture: str) -> bool:
        """Whether the rows of an architecture are recorded."""
        return any(name.startswith(f"{architecture}-") for name in self.kernels)


def nvrtc_version() -> str:
    """Of the compiler that runs."""
    from cupy.cuda import nvrtc

    return "{}.{}".format(*nvrtc.getVersion())


def read(path: Path = RECORD) -> Record:
    """The stored account."""
    stored: dict[str, Any] = json.loads(path.read_text())
    kernels = {name: (row[0], row[1]) for name, row in stored["kernels"].items()}
    return Record(stored["nvrtc"], kernels)


def write(path: Path, record: Record) -> None:
    """One line a kernel, so that a change is a line of a diff."""
    lines = [f'  "{name}": [{r}, {local}]' for name, (r, local) in sorted(record.kernels.items())]
    body = ",\n".join(lines)
    path.write_text(f'{{\n "nvrtc": "{record.nvrtc}",\n "kernels": {{\n{body}\n }}\n}}\n')


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What a record says otherwise than the one before, in lines."""
    changed = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return [f"{name}: {old.get(name, 'new')} -> {new.get(name, 'gone')}" for name in changed]


def main() -> int:
    """Build, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--architectures", nargs="+", default=["75", "80", "86", "90"])
    parser.add_argument("--only", default="", help="part of a name, as a regular expression")
    parser.add_argument("--rare", action="store_true", help="what few calls ask for as well")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    old = read() if RECORD.exists() else Record(nvrtc_version(), {})
    if asked.only and old.nvrtc != nvrtc_version():
        parser.error(f"the record is of NVRTC {old.nvrtc}, this is {nvrtc_version()}: no --only")
    wanted = {}
    for architecture in asked.architectures:
        wanted |= rare_rows(architecture) if asked.rare else {}
        wanted |= rows(architecture)
    wanted = {name: config for name, config in wanted.items() if re.search(asked.only, name)}
    with ThreadPoolExecutor(asked.jobs) as pool:
        built = dict(zip(wanted, pool.map(build, wanted.values()), strict=True))
    kept = old.kernels if old.nvrtc == nvrtc_version() else {}
    known = {name for a in LIMITS for name in (rows(a) | rare_rows(a))}
    new = {name: row for name, row in kept.items() if name in known}
    new |= {name: (b.registers, b.local) for name, b in built.items()}
    print("\n".join(differences(old.kernels, new)) or "nothing changed")
    write(RECORD, Record(nvrtc_version(), new))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The records of which bugs were killed, with digests of the code at that time."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from cuflash.cuda.source import include_closure

__all__ = [
    "EMULATED_RECORD",
    "HOPPER_RECORDS",
    "RECORD",
    "ROOT",
    "device_digest",
    "emulator_digest",
    "hopper_digest",
    "read",
    "store",
]

ROOT = Path(__file__).resolve().parents[2]
#: The record of all bugs of device code but FlashAttention-3's.
RECORD = Path(__file__).with_name("killed.json")
#: The records of FlashAttention-3 on a GPU of compute capability 9.0, by pass.
HOPPER_RECORDS = {
    name: Path(__file__).with_name(f"killed_hopper_{name}.json") for name in ("forward", "backward")
}
#: The record of FlashAttention-3 in the emulator.
EMULATED_RECORD = Path(__file__).with_name("killed_hopper_emulated.json")


def device_digest() -> str:
    """Digest of the device code that the emulator runs: all but FlashAttention-3."""
    kernels = (ROOT / "cuda_src").rglob("*.cu")
    return _digest(_closure(kernel for kernel in kernels if kernel.parent.name != "fa3"))


def emulator_digest() -> str:
    """Digest of the emulator and of the rows that it runs."""
    folder = ROOT / "tests" / "emulator"
    return _digest({*folder.glob("cuda/**/*.*h*"), folder / "build.py", folder / "rows.py"})


def hopper_digest(kernel: str, files: Iterable[str]) -> str:
    """Digest of a pass of FlashAttention-3, and of kernels and host code among ``files``."""
    named = {ROOT / name for name in files}
    kernels = {path for path in named if path.suffix == ".cu"}
    host = {path for path in named if path.suffix == ".py"}
    return _digest(_closure(kernels | {ROOT / "cuda_src" / "fa3" / f"{kernel}.cu"}) | host)


def _closure(kernels: Iterable[Path]) -> set[Path]:
    """The kernels' files, those of features, and all they include."""
    root = ROOT / "cuda_src"
    entries = [*kernels, *root.glob("features/*.cuh")]
    return {path for entry in entries for path in include_closure(root, entry)}


def _digest(files: Iterable[Path]) -> str:
    """Digest of files without comments and white space; the indentation of Python counts."""
    digest = hashlib.sha256()
    for path in sorted(files):
        text = path.read_text()
        if path.suffix == ".py":
            lines = (re.sub(r"#[^\n]*", "", line).rstrip() for line in text.splitlines())
            code = "\n".join(line for line in lines if line)
        else:
            code = "".join(re.sub(r"//[^\n]*", "", text).split())
        digest.update(path.relative_to(ROOT).as_posix().encode())
        digest.update(code.encode())
    return digest.hexdigest()[:16]


def read(path: Path = RECORD) -> dict[str, Any]:
    """A stored record."""
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def store(
    path: Path,
    seen: Mapping[str, Any],
    ran: Collection[str],
    killed: Mapping[str, str],
    every: Collection[str],
) -> None:
    """Bring a stored record up to date with the bugs that ran, and with what killed them.

    ``seen`` holds the device on which they ran and the digest of the code. The record keeps its own
    digest and its entries for other bugs. If ``every`` bug ran, on another device or with other
    code, the record begins anew. Otherwise a record of another device does not change.
    """
    known = read(path) if path.exists() else {**seen, "killed": {}}
    if known["ran_on"] != seen["ran_on"] and not set(every) <= set(ran):
        print(f"{path.name} stays: it is of {known['ran_on']}, and not every bug of it ran")
        return
    if set(every) <= set(ran) and any(known[key] != seen[key] for key in seen):
        known = {**seen, "killed": {}}
    rows = {bug: by for bug, by in known["killed"].items() if bug not in ran or bug in killed}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**known, "killed": {**rows, **killed}}, indent=1) + "\n")

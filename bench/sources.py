"""Which kernels a pass runs, and the digest of all their sources."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from cuflash.cuda.source import find_sources, include_closure

__all__ = ["KERNELS", "digest", "digest_now"]

#: Folder and file of every kernel of a pass.
KERNELS = {
    ("fa1", "forward"): (("fa1", "forward"),),
    ("fa1", "backward"): (("steps", "delta"), ("fa1", "backward")),
    ("fa2", "forward"): (("fa2", "forward"),),
    ("fa2", "backward"): (
        ("steps", "statistics"),
        ("fa2", "backward"),
        ("steps", "convert_dq"),
    ),
    ("fa3", "forward"): (("fa3", "forward"),),
    ("fa3", "backward"): (
        ("steps", "statistics"),
        ("fa3", "backward"),
        ("steps", "convert_dq"),
        ("fa3", "sum_parts"),
    ),
}


#: Comments and assertions.
_NO_CODE = re.compile(r"//[^\n]*|/\*.*?\*/|static_assert\(.*?\);", re.DOTALL)


def digest(root: Path, algorithm: str, op: str) -> str:
    """Changes when one of the kernels can have changed; of a pass, or ``forward and backward``.

    Comments, assertions and the space between words do not count: they make no code.
    """
    kernels = [kernel for one in op.split(" and ") for kernel in KERNELS[algorithm, one]]
    found = hashlib.sha256()
    for folder, name in kernels:
        for path in include_closure(root, root / folder / f"{name}.cu"):
            words = _NO_CODE.sub(" ", path.read_text()).split()
            found.update("\0".join([path.name, *words, ""]).encode())
    return found.hexdigest()[:16]


def digest_now(algorithm: str, op: str) -> str:
    """Of the sources that this process compiles."""
    return digest(find_sources(), algorithm, op)

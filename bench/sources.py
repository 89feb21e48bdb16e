"""Which kernels a pass runs, and the digest of all their sources."""

from __future__ import annotations

import hashlib
from pathlib import Path

from cuflash.cuda.source import find_sources, source_digest

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
    ),
}


def digest(root: Path, algorithm: str, op: str) -> str:
    """Changes when one of the kernels can have changed; of a pass, or ``forward and backward``."""
    kernels = [kernel for one in op.split(" and ") for kernel in KERNELS[algorithm, one]]
    parts = [source_digest(root, *kernel) for kernel in kernels]
    return parts[0] if len(parts) == 1 else hashlib.sha256("".join(parts).encode()).hexdigest()[:16]


def digest_now(algorithm: str, op: str) -> str:
    """Of the sources that this process compiles."""
    return digest(find_sources(), algorithm, op)

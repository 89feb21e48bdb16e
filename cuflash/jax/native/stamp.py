"""A number that stands for the sources of the handler and of what it reads.

Numba keeps compiled code by the time stamp of one file. Code that was kept
from other sources answers with another stamp, and is compiled anew.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

__all__ = ["STAMP", "number_of"]

_SOURCES = ("frame", "handler", "launching", "layout", "limits", "machine", "registry", "said")


def number_of(text: bytes) -> int:
    """A positive number of 62 bits that stands for a text."""
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 2 | 1


STAMP = number_of(
    b"".join(Path(__file__).with_name(f"{name}.py").read_bytes() for name in _SOURCES)
)

"""A number that identifies the sources of the handler and of the modules it uses.

Numba keeps compiled code by the time stamp of one file. Code from other sources
returns another stamp, and is compiled anew.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

__all__ = ["STAMP", "number_of"]

_SOURCES = ("frame", "handler", "launching", "layout", "limits", "machine", "registry", "said")


def number_of(text: bytes) -> int:
    """Return a positive number of 62 bits, a hash of a text."""
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 2 | 1


STAMP = number_of(
    b"".join(Path(__file__).with_name(f"{name}.py").read_bytes() for name in _SOURCES)
)

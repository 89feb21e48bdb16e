"""What an ordinary run leaves to another day: tests of one kind take turns."""

from __future__ import annotations

import datetime
import zlib

__all__ = ["has_turn"]


def has_turn(name: str, days: int) -> bool:
    """Whether the test or kernel of this name has its turn today; it has one in ``days`` days."""
    return (zlib.crc32(name.encode()) + datetime.date.today().toordinal()) % days == 0

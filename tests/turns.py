"""What an ordinary run leaves to another day: tests of one kind take turns."""

from __future__ import annotations

import datetime
import zlib

__all__ = ["has_turn"]


def has_turn(name: str, days: int) -> bool:
    """Whether it is the turn of what has this name, which comes once within so many days."""
    return (zlib.crc32(name.encode()) + datetime.date.today().toordinal()) % days == 0

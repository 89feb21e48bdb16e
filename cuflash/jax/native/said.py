"""Errors that a handler returns to XLA."""

from __future__ import annotations

from . import frame as xla
from .limits import MOST_TEXT
from .machine import call_for_word, compiled, load, load32, room, store, store32

__all__ = ["error_of", "failed_with"]

_text, _given = room(MOST_TEXT), room(32)


@compiled
def error_of(frame: int, text: int) -> int:
    """Return an error of XLA with the C string at an address."""
    given = _given()
    store(given, 32)
    store(given + 8, 0)
    store(given + 16, text)
    store(given + 24, xla.CODE_INTERNAL)
    return call_for_word(load(load(frame + xla.FRAME_API) + xla.API_ERROR_CREATE), given)


@compiled
def failed_with(frame: int, message: int, number: int) -> int:
    """Return an error of XLA with a text of the table and a number after it, in decimal digits."""
    text, count = _text(), load(message)
    for i in range(count):
        store(text + 8 * i, load(message + 8 + 8 * i))
    digits, most = 1, 10
    while most <= number and digits < 18:
        digits, most = digits + 1, most * 10
    end = text + load(message + 8 + 8 * count)  # the length in bytes follows the words
    store(end, 0)
    store(end + 8, 0)
    store(end + 16, 0)
    rest = number
    for i in range(digits):
        place = end + digits - 1 - i
        store32(place, 48 + rest % 10 + (load32(place) & 0xFFFFFF00))
        rest //= 10
    return error_of(frame, text)

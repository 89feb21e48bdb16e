"""The demo's text: ``pydoc_data/topics.py``, English that comes with CPython."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentValueError, CuflashError

__all__ = ["BYTES", "Text", "read_text", "sequences"]

#: Number of different bytes, the classes of the prediction.
BYTES = 256
#: Fraction of the text, at its end, that is held out from training.
_HELD_OUT = 0.1

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Text:
    """A text in two pieces: the training text and, after it, the held-out text."""

    source: str
    training: Bytes
    held_out: Bytes

    @classmethod
    def split(cls, source: str, content: bytes) -> Text:
        """Split a text; its last tenth is held out."""
        everything = np.frombuffer(content, np.uint8)
        cut = round(everything.size * (1 - _HELD_OUT))
        return cls(source, everything[:cut], everything[cut:])

    def require(self, seqlen: int) -> None:
        """Raise if one of the texts is too short for a sequence and the byte after it.

        Raises
        ------
        ArgumentValueError
            For ``seqlen``, with the largest possible value.
        """
        longest = min(self.training.size, self.held_out.size) - 1
        if seqlen > longest:
            raise ArgumentValueError("seqlen", str(seqlen), f"at most {longest}, the held-out text")

    def starts(self, steps: int, batch: int, seqlen: int, seed: int) -> NDArray[np.int64]:
        """Return where every step's sequences begin in the training text: (steps, batch)."""
        ends = self.training.size - seqlen
        return np.random.default_rng(seed).integers(0, ends, (steps, batch))

    def held_out_windows(self, seqlen: int) -> tuple[Bytes, Bytes]:
        """Return the held-out text as rows of ``seqlen`` bytes, and the byte after each byte.

        The remainder at the end, shorter than a row, is dropped.
        """
        rows = (self.held_out.size - 1) // seqlen
        shape = (rows, seqlen)
        first, second = self.held_out[: rows * seqlen], self.held_out[1 : rows * seqlen + 1]
        return first.reshape(shape), second.reshape(shape)


def sequences(text: Any, starts: Any, seqlen: int, xp: Any) -> tuple[Any, Any]:
    """Return rows of a text and the byte that follows each byte, on the device of the text."""
    rows = text[starts[:, None] + xp.arange(seqlen + 1)]
    return rows[:, :-1], rows[:, 1:]


def read_text() -> Text:
    """Return the topics of Python's ``help()``: the bytes of their source file.

    Raises
    ------
    CuflashError
        If this Python was installed without that file.
    """
    package = importlib.util.find_spec("pydoc_data")
    for folder in (package and package.submodule_search_locations) or ():
        path = Path(folder) / "topics.py"
        if path.is_file():
            return Text.split("pydoc_data/topics.py", path.read_bytes())
    raise CuflashError("this Python was installed without pydoc_data/topics.py, the demo's text")

"""The complete list of pairs of names that no call may combine. Every other pair runs.

A name is that of a feature, an algorithm, a backend, a pass or a storage type, or "gradient of" an
array.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import UnsupportedError

__all__ = ["REFUSED", "Refusal", "check_refused", "gradients_of"]


@dataclass(frozen=True)
class Refusal:
    """Two names that no call may combine, and the reason."""

    first: str
    second: str
    reason: str


#: All other features run together, with every backend, pass and dtype. An algorithm that lacks a
#: kernel for a combination says so when it plans; "auto" then takes the next one.
REFUSED: tuple[Refusal, ...] = (
    Refusal("softcap", "score_mod", "the text can cap scores: cap * tanh(s / cap)"),
    Refusal("packed_lengths", "used_lengths", "offsets say where sequences begin and end"),
    *(
        Refusal("packed_lengths", name, "packed sequences have no pairs with those of others")
        for name in ("bias", "mask", "block_mask")
    ),
    Refusal("packed_lengths", "gradient of alibi_slopes", "its sums are by entries of a batch"),
)


def gradients_of(wrt: Iterable[str]) -> tuple[str, ...]:
    """The names in the list for the gradients of these arrays."""
    return tuple(f"gradient of {name}" for name in wrt)


def check_refused(names: Iterable[str]) -> None:
    """Check the names of a call against the list.

    Raises
    ------
    UnsupportedError
        Naming both members of a refused pair, and the reason.
    """
    present = frozenset(names)
    for pair in REFUSED:
        if pair.first in present and pair.second in present:
            raise UnsupportedError(f"{pair.first} with {pair.second}: {pair.reason}")

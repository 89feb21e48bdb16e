"""The closed list of what does not go together. Every other pair runs.

A name is that of a feature, an algorithm, a backend, a pass or a storage type,
or "gradient of" an array.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import UnsupportedError

__all__ = ["REFUSED", "Refusal", "check_refused", "gradients_of"]


@dataclass(frozen=True)
class Refusal:
    """Two names that no call may have together, and why."""

    first: str
    second: str
    reason: str


#: All other features run together, with every backend, pass and dtype. An algorithm that has no
#: kernel for some of them says so when it plans: then "auto" takes the next one.
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
    """What the list calls the gradients of these arrays."""
    return tuple(f"gradient of {name}" for name in wrt)


def check_refused(names: Iterable[str]) -> None:
    """Hold what a call has against the list.

    Raises
    ------
    UnsupportedError
        Naming both of a pair that is refused, and the reason.
    """
    present = frozenset(names)
    for pair in REFUSED:
        if pair.first in present and pair.second in present:
            raise UnsupportedError(f"{pair.first} with {pair.second}: {pair.reason}")

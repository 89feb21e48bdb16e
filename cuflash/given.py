"""The arrays of features, as the public functions pass them on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["ARRAYS", "add_given"]

#: The array arguments of features, in the order in which :func:`add_given` takes them.
ARRAYS = (
    *("alibi_slopes", "bias", "mask", "block_mask", "sinks", "dropout_seed"),
    *("seqused_q", "seqused_kv", "cu_seqlens_q", "cu_seqlens_kv"),
)


def add_given(
    arrays: dict[str, Any],
    given: tuple[Any, ...],
    of_score: Mapping[str, Any],
    after: tuple[str, ...] = (),
) -> None:
    """Add the given arrays to those of a call; None means absent.

    Parameters
    ----------
    arrays
        The arrays of the call, by name.
    given
        One value for each of :data:`ARRAYS`, then one for each name in ``after``.
    of_score
        The arrays of a score function, by name.
    after
        Names of other arguments.
    """
    features, others = given[: len(ARRAYS)], given[len(ARRAYS) :]
    named = {**dict(zip(ARRAYS, features, strict=True)), **of_score}
    named |= dict(zip(after, others, strict=True))
    arrays |= {name: array for name, array in named.items() if array is not None}

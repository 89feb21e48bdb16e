"""The arrays of features as the public functions hand them on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["ARRAYS", "add_given"]

#: Arguments of features that are arrays, in the order in which :func:`add_given` takes them.
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
    """Add what was given to the arrays of a call, None being nothing.

    Parameters
    ----------
    arrays
        Of the call, by name.
    given
        One for each of :data:`ARRAYS`, and those that come ``after``.
    of_score
        The arrays of a function of scores, by name.
    after
        Names of what is no array of a feature.
    """
    features, others = given[: len(ARRAYS)], given[len(ARRAYS) :]
    named = {**dict(zip(ARRAYS, features, strict=True)), **of_score}
    named |= dict(zip(after, others, strict=True))
    arrays |= {name: array for name, array in named.items() if array is not None}

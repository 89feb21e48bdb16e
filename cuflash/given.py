"""The arguments that most calls do not give, as the public functions pass them on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .block_mask import split_block_mask
from .options import seed_of
from .score_mod import with_arrays

__all__ = ["ARRAYS", "add_given", "add_some", "split_given"]

#: The array arguments of features, in the order in which :func:`add_given` takes them.
ARRAYS = (
    *("alibi_slopes", "bias", "mask", "block_mask", "sinks", "dropout_seed"),
    *("seqused_q", "seqused_kv", "cu_seqlens_q", "cu_seqlens_kv"),
)


def add_given(arrays: dict[str, Any], given: tuple[Any, ...], of_score: Mapping[str, Any]) -> None:
    """Add the given arrays to those of a call; None means absent.

    Parameters
    ----------
    arrays
        The arrays of the call, by name.
    given
        One value for each of :data:`ARRAYS`.
    of_score
        The arrays of a score function, by name.
    """
    named = {**dict(zip(ARRAYS, given, strict=True)), **of_score}
    arrays |= {name: array for name, array in named.items() if array is not None}


def add_some(arguments: dict[str, Any], **given: Any) -> None:
    """Add the given arguments to others; None means absent."""
    arguments |= {name: value for name, value in given.items() if value is not None}


def split_given(
    keywords: dict[str, Any], score_mod: Any, block_mask: Any, dropout_seed: Any
) -> tuple[Any, Any, Mapping[str, Any]]:
    """Split arguments that have a keyword, which is added, and arrays, which are returned.

    Returns
    -------
    blocks, seed, of_score
        The arrays of a block mask and of a seed, or None, and those of a score function by name.
    """
    block, shown = split_block_mask(block_mask)
    seed, seeds = seed_of(dropout_seed)
    score, of_score = with_arrays(score_mod)
    add_some(keywords, score_mod=score, block_mask=block, dropout_seed=seed)
    return shown, seeds, of_score

"""Entries that are shorter than the arrays that they stand in, without an array of pairs.

Keys behind the end of an entry are hidden by a mask that all queries share. Rows of queries behind
the end are computed and set to zero: their gradients are then zero too, so no mask is needed.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from ..errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from .arguments import as_array

__all__ = ["hide_keys", "without_rows"]

_KEYS, _QUERIES = "key_value_seq_lengths", "query_seq_lengths"


def hide_keys(arrays: dict[str, Any], lengths: Any) -> dict[str, Any]:
    """The arrays of a call with a mask that shows so many keys of each entry.

    Parameters
    ----------
    arrays
        By the names of their tensors, and checked.
    lengths
        As they were given; None for all keys.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If the lengths are no integers, one for each entry.
    UnsupportedError
        If the caller's mask and the lengths need a larger array than either.
    """
    if lengths is None:
        return arrays
    keys, mask = arrays["k"], arrays.get("mask")
    shown = _shown(_KEYS, lengths, keys)[:, None, None, :]
    if mask is None:
        return {**arrays, "mask": shown}
    shape = jnp.broadcast_shapes(mask.shape, shown.shape)
    if math.prod(shape) > max(mask.size, shown.size):
        raise UnsupportedError(
            f"mask of shape {tuple(mask.shape)} and {_KEYS} of shape {(len(shown),)} together need "
            f"an array of shape {shape}: give one of the two, or one mask that says both"
        )
    return {**arrays, "mask": mask & shown}


def without_rows(out: Any, lse: Any, lengths: Any) -> tuple[Any, Any]:
    """The results with those of queries behind the end of an entry set to what sees no key.

    Parameters
    ----------
    out, lse
        With or without an axis of the batch.
    lengths
        As they were given; None for all queries.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If the lengths are no integers, one for each entry.
    """
    if lengths is None:
        return out, lse
    shown = _shown(_QUERIES, lengths, out)
    shown = shown if out.ndim == 4 else shown[0]
    rows = shown[..., None, None]
    return jnp.where(rows, out, 0), jnp.where(shown[..., None, :], lse, -jnp.inf)


def _shown(name: str, lengths: Any, like: Any) -> Any:
    """(batch, seqlen): which places of an array stand before the end of their entry."""
    lengths = as_array(name, lengths)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ArgumentTypeError(name, f"dtype {lengths.dtype}", "integers")
    batch = like.shape[0] if like.ndim == 4 else 1
    if lengths.shape != (batch,):
        raise ArgumentValueError(name, f"shape {tuple(lengths.shape)}", f"shape {(batch,)}")
    return jnp.arange(like.shape[-3]) < lengths[:, None]

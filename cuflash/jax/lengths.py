"""The lengths of entries that are shorter than their arrays, and offsets of packed sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from ..errors import ArgumentTypeError, ArgumentValueError
from .arguments import as_array

__all__ = ["as_int32", "lengths_of", "offsets_of"]

#: Arguments, and the tensors that they are.
_LENGTHS = {"query_seq_lengths": "seqused_q", "key_value_seq_lengths": "seqused_kv"}


def lengths_of(given: Mapping[str, Any], batch: int) -> dict[str, Any]:
    """Return the lengths that were given, by the names of their tensors.

    Parameters
    ----------
    given
        Every argument by name.
    batch
        Number of entries.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If the lengths are no integers, one for each entry.
    """
    return {
        tensor: _checked(name, given[name], batch)
        for name, tensor in _LENGTHS.items()
        if given[name] is not None
    }


def offsets_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the offsets of packed sequences that were given, by name.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If they are no integers, or query has a batch axis.
    """
    found = {
        name: as_int32(name, as_array(name, given[name]))
        for name in ("cu_seqlens_q", "cu_seqlens_kv")
        if given[name] is not None
    }
    axes = as_array("query", given["query"]).ndim
    if found and axes != 3:
        expected = "(total, heads, head_dim) beside cu_seqlens_q and cu_seqlens_kv"
        raise ArgumentValueError("query", f"{axes} axes", expected)
    return found


def _checked(name: str, lengths: Any, batch: int) -> Any:
    lengths = as_int32(name, as_array(name, lengths))
    if lengths.shape != (batch,):
        raise ArgumentValueError(name, f"shape {tuple(lengths.shape)}", f"shape {(batch,)}")
    return lengths


def as_int32(name: str, lengths: Any) -> Any:
    """Return an array of integers as int32; larger ones are clamped, and stay out of range.

    Raises
    ------
    ArgumentTypeError
        If it holds no integers.
    """
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ArgumentTypeError(name, f"dtype {lengths.dtype}", "integers")
    if lengths.dtype == jnp.int32:
        return lengths
    here, there = jnp.iinfo(lengths.dtype), jnp.iinfo(jnp.int32)
    within = jnp.clip(lengths, max(here.min, there.min), min(here.max, there.max))
    return within.astype(jnp.int32)

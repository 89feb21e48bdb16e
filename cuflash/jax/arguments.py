"""The arguments of a call as JAX arrays, cast if the call has a ``dtype``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..block_mask import BlockMask, split_block_mask
from ..errors import ArgumentTypeError, ArgumentValueError
from ..features.dropout import PART_LENGTH, SEED_LENGTHS
from ..tensors import tensors

__all__ = ["arrays_of", "as_array", "seed_of", "with_all_axes"]

jax.tree_util.register_dataclass(BlockMask, data_fields=["blocks"], meta_fields=["block"])

#: Arguments that are cast, and the tensors that they are.
_CAST = {"query": "q", "key": "k", "value": "v"}


def arrays_of(given: Mapping[str, Any], dtype: str | None) -> dict[str, Any]:
    """Return the arrays that were given, by the names of their tensors.

    Parameters
    ----------
    given
        Every argument by name.
    dtype
        Dtype that query, key and value are cast to; None for no cast.

    Raises
    ------
    ArgumentTypeError
        For an argument that is no array.
    """
    arrays = {t: _cast(as_array(name, given[name]), dtype) for name, t in _CAST.items()}
    return arrays | _of_features(given, as_array("query", given["query"]).dtype, dtype)


def with_all_axes(name: str, array: Any) -> Any:
    """Return an array that broadcasts, with an axis of 1 for every axis that it lacks."""
    lacking = len(tensors()[name].axes) - array.ndim
    return jnp.expand_dims(array, tuple(range(lacking)))


def seed_of(rng: Any) -> Any:
    """Return the words of a key of ``jax.random``, followed by zeros.

    The zeros are the offset, if the key has two words, and the entry and the head at
    which the arrays begin.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If it is no key, or several.
    """
    typed = jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
    words = jax.random.key_data(rng) if typed else as_array("dropout_rng", rng)
    expected = "one key of jax.random, of 2 or 4 words of uint32"
    if words.dtype != "uint32":
        raise ArgumentTypeError("dropout_rng", f"dtype {words.dtype}", expected)
    if words.shape not in [(length,) for length in SEED_LENGTHS]:
        raise ArgumentValueError("dropout_rng", f"shape {tuple(words.shape)}", expected)
    return jnp.concatenate([words, jnp.zeros(PART_LENGTH - words.shape[0], words.dtype)])


def _of_features(given: Mapping[str, Any], of_query: Any, dtype: str | None) -> dict[str, Any]:
    """Return the arrays of features that were given, cast with query if they have its dtype.

    A mask is boolean and never cast.

    Parameters
    ----------
    given
        Every argument by name.
    of_query
        The dtype of query before its cast.
    dtype
        Dtype that query is cast to; None for no cast.
    """
    before = {"alibi_slopes": _statistics(of_query), "bias": of_query, "sinks": of_query}
    slopes = None if dtype is None else _statistics(dtype)
    after = {"alibi_slopes": slopes, "bias": dtype, "sinks": dtype}
    names = (*before, "mask")
    arrays = {name: as_array(name, given[name]) for name in names if given[name] is not None}
    if "mask" in arrays:
        _check_boolean("mask", arrays["mask"])
    if given["block_mask"] is not None:
        _, blocks = split_block_mask(given["block_mask"])
        arrays["block_mask"] = as_array("block_mask", blocks)
    return {n: _cast(a, after[n]) if a.dtype == before.get(n) else a for n, a in arrays.items()}


def _check_boolean(name: str, array: Any) -> None:
    """Refuse numbers: they may be meant as a bias or as a mask."""
    if array.dtype != bool:
        remedy = "bool: dtype=bool where Flax makes the mask, or mask != 0; numbers to add are bias"
        raise ArgumentTypeError(name, f"dtype {array.dtype}", remedy)


def _statistics(dtype: Any) -> str:
    """Return the dtype of sums over arrays of a dtype."""
    return "float64" if jnp.dtype(dtype) == "float64" else "float32"


def as_array(name: str, value: Any) -> Any:
    """Return the value as an array of JAX.

    Raises
    ------
    ArgumentTypeError
        If it cannot be one.
    """
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # the last of deleted arrays
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise ArgumentTypeError(name, kind, "an array") from error


def _cast(array: Any, dtype: str | None) -> Any:
    """Return the array in another dtype; a complex one unchanged, so that it is refused later."""
    kept = dtype is None or jnp.issubdtype(array.dtype, jnp.complexfloating)
    return array if kept else array.astype(dtype)

"""The arguments of a call with caches: native arrays, and the sizes that follow from them."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays.adopt import Adopted, adopt
from ..arrays.spec import TensorSpec
from ..errors import ArgumentTypeError, ArgumentValueError, shown
from .float8 import Numbers

__all__ = ["CacheCall", "Sizes", "adopt_all", "check_interleaved", "length_of"]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call with caches.

    Attributes
    ----------
    batch, heads_kv, head_dim, head_dim_v
        As for attention.
    new_tokens
        Number of tokens appended to every entry, or, if they are packed, to all; 0
        without an append.
    entries
        Number of entries of the caches, or of pages.
    slots
        Number of slots of an entry of the caches, or of a page.
    capacity
        Number of slots of an entry of the batch; with pages, those of all pages in its row.
    most_queries
        The most queries of an entry if queries are packed; 0 if every entry has
        equally many.
    """

    batch: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    new_tokens: int
    entries: int
    slots: int
    capacity: int
    most_queries: int = 0


@dataclass(frozen=True)
class CacheCall:
    """A call whose shapes and dtypes are checked.

    Attributes
    ----------
    arrays
        The given arrays by argument name.
    length
        ``cache_seqlens`` if it is a number.
    interleaved
        Whether the columns of a rotated pair are neighbours; None if nothing is rotated.
    sizes
        The sizes, from the shapes.
    scales
        The scales of float8 caches that are numbers; None for other caches.
    """

    arrays: Mapping[str, Adopted]
    length: int | None
    interleaved: bool | None
    sizes: Sizes
    scales: Numbers | None = None

    @property
    def device(self) -> int | None:
        """The CUDA device of the arrays; None for host memory."""
        return self.arrays["k_cache"].spec.device

    def native(self, name: str) -> Any:
        """Return an array by its argument's name; None if it was not given."""
        return self.arrays[name].native if name in self.arrays else None

    def spec(self, name: str) -> TensorSpec:
        """Return the description of an array that was given."""
        return self.arrays[name].spec


def adopt_all(given: Mapping[str, Any], needed: tuple[str, ...] = ()) -> dict[str, Adopted]:
    """Return native arrays by argument name, without those that are None and not needed.

    Raises
    ------
    ArgumentTypeError
        If one is no array.
    BackendUnavailableError
        If one is in CUDA memory that cannot be used.
    """
    return {
        name: adopt(name, value)
        for name, value in given.items()
        if value is not None or name in needed
    }


def length_of(value: Any) -> tuple[int | None, Any]:
    """Return ``cache_seqlens`` as a number and as an array, one of which is None.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If it is no length.
    """
    if value is None or isinstance(value, (bool, np.bool_)):
        expected = "an int32 array of shape (batch,), or an int"
        raise ArgumentTypeError("cache_seqlens", shown(value), expected)
    if not isinstance(value, numbers.Number):
        return None, value
    if not isinstance(value, numbers.Integral):
        raise ArgumentTypeError("cache_seqlens", shown(value), "an int or an int32 array")
    return int(value), None


def check_interleaved(value: Any, rotates: bool) -> bool | None:
    """Return ``rotary_interleaved``, which the tables need and which has no default.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If it is neither True nor False, or is given without tables or missing with them.
    """
    if not rotates:
        if value is not None:
            raise ArgumentValueError("rotary_interleaved", shown(value), "None without rotary_cos")
        return None
    if value is None:
        expected = "True (columns 2i and 2i+1 form a pair) or False (columns i and i + pairs do)"
        raise ArgumentValueError("rotary_interleaved", "None beside rotary_cos", expected)
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentTypeError("rotary_interleaved", shown(value), "True or False")
    return bool(value)

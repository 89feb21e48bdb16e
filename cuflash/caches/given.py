"""What a call with caches is given: its arrays as native ones, and the sizes that follow."""

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
    """Of a call with caches.

    Attributes
    ----------
    batch, heads_kv, head_dim, head_dim_v
        As for attention.
    new_tokens
        Rows of every entry that are appended, of all where they are packed; 0 where none are.
    entries
        Of the caches, or their pages.
    slots
        Of an entry of the caches, or of a page.
    capacity
        Slots that an entry of the batch has: of all pages in its row of the table.
    most_queries
        Of an entry, where queries are packed; 0 where every entry has equally many.
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
    """A call, checked as far as shapes and dtypes say.

    Attributes
    ----------
    arrays
        By argument name; what was not given is absent.
    length
        ``cache_seqlens`` where it is a number.
    interleaved
        Whether rotated pairs are neighbours; None where nothing is rotated.
    sizes
        What the shapes say.
    scales
        Of float8 caches those that are numbers; None of other caches.
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
        """An array by its argument's name; None where it was not given."""
        return self.arrays[name].native if name in self.arrays else None

    def spec(self, name: str) -> TensorSpec:
        """The description of an array that was given."""
        return self.arrays[name].spec


def adopt_all(given: Mapping[str, Any], needed: tuple[str, ...] = ()) -> dict[str, Adopted]:
    """Native arrays by argument name, None being nothing but where an array is needed.

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
    """``cache_seqlens`` as a number and as an array, of which one is None.

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
    """``rotary_interleaved``, which goes with the tables and has no default.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If it is neither True nor False, or stands without tables or they without it.
    """
    if not rotates:
        if value is not None:
            raise ArgumentValueError("rotary_interleaved", shown(value), "None without rotary_cos")
        return None
    if value is None:
        expected = "True (columns 2i and 2i+1 turn together) or False (i and i + half of them)"
        raise ArgumentValueError("rotary_interleaved", "None beside rotary_cos", expected)
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentTypeError("rotary_interleaved", shown(value), "True or False")
    return bool(value)

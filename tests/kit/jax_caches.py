"""Problems with caches in the form that ``cuflash.jax`` takes, and a check of its caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from .caches import Built, same_bits

__all__ = ["check_caches", "in_jax"]


def in_jax(built: Built, jax: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of a call by argument name, as JAX has them, and the keywords.

    Float8 caches are bytes in a built problem, and float8 numbers in JAX.
    """
    caches = built.caches
    if built.case.float8:
        caches = {name: cache.view(ml_dtypes.float8_e4m3fn) for name, cache in caches.items()}
    given = {name: array for name, array in built.arrays.items() if name != "overflow"}
    arrays = {name: jax.numpy.asarray(array) for name, array in {**given, **caches}.items()}
    keywords = {**built.options, **built.keywords}
    keywords.pop("cache_dtype", None)
    return arrays, keywords


def check_caches(
    built: Built, raw: list[Any], caches: Sequence[Any], arrays: dict[str, Any]
) -> None:
    """Returned caches have the bits of the reference's buffers; given caches do not change."""
    kind = "float8_e4m3fn" if built.case.float8 else built.case.dtype
    for name, view, cache in zip(("k_cache", "v_cache"), built.views(raw), caches, strict=True):
        assert cache.dtype == arrays[name].dtype == kind
        assert same_bits(_bits(cache), _bits(view))
        assert same_bits(_bits(arrays[name]), _bits(built.caches[name]))


def _bits(cache: Any) -> Any:
    """The bytes of every element."""
    return np.ascontiguousarray(cache).view(np.uint8)
